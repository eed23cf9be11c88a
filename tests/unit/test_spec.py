"""The grammar: what parses, what the errors say, and that printing is its inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdbridge import policies
from hvdbridge.errors import ConfigurationError, SpecError
from hvdbridge.policies import Bf16, ErrorFeedback, Fp16, Mean, Partition, Sum, Warmup, from_spec, register, to_spec
from hvdbridge.policy.base import Policy
from hvdbridge.policy.options import option
from hvdbridge.policy.spec import MAX_DEPTH


@dataclass(frozen=True)
class Options(Policy):
    """One option of each kind."""

    ratio: float = option(0.01, above=0, at_most=1)
    levels: int = option(4, at_least=1)
    text: str = "x"
    mode: Literal["nearest", "stochastic"] = "nearest"
    limit: float | None = None
    flag: bool = False
    other: Policy | None = None
    additive: ClassVar[bool] = True


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_registered", {})
    register("options", Options)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("mean", Mean()),
        (" mean : exact = true ", Mean(exact=True)),
        ("mean()", Mean()),
        ("fp16", Fp16()),
        ("fp16(mean)", Fp16()),
        ("bf16(sum)", Bf16(Sum())),
        ("ef:inner=bf16", ErrorFeedback(Bf16())),
        ("ef(options:ratio=0.5)", ErrorFeedback(Options(ratio=0.5))),
        ("warmup(steps=7, then=ef(fp16))", Warmup(ErrorFeedback(Fp16()), 7)),
        ("warmup(bf16, first=fp16)", Warmup(Bf16(), first=Fp16())),
        ("warmup(then=options:ratio=1, steps=3)", Warmup(Options(ratio=1.0), 3)),
        ("options:ratio=1e-3,levels=3,mode=stochastic", Options(1e-3, 3, mode="stochastic")),
        ("options(limit=2, text='a, \\'b\\')', flag=true)", Options(limit=2.0, text="a, 'b')", flag=True)),
        ("options(limit=none, text='none', other=none)", Options(text="none")),
        ('options(text="", other=ef(mean))', Options(text="", other=ErrorFeedback(Mean()))),
        (
            "partition(*.bias=mean, <=1024=sum, >2d=mean(exact=true), a.[0-3].*=fp16, 'x,=y'=bf16, rest=sum)",
            Partition(
                (("*.bias", Mean()), ("<=1024", Sum()), (">2d", Mean(True)), ("a.[0-3].*", Fp16()), ("x,=y", Bf16())),
                rest=Sum(),
            ),
        ),
    ],
)
def test_it_parses(text: str, policy: Policy) -> None:
    assert from_spec(text) == policy
    assert from_spec(to_spec(policy)) == policy


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 0, "a name or a value is missing"),
        ("maen", 0, "unknown policy 'maen'. Did you mean 'mean'? Known: adasum,"),
        ("ef(men)", 3, "Did you mean 'mean'?"),
        ("mean:exat=true", 5, "mean has no option 'exat'. Did you mean 'exact'? Known: exact."),
        ("sum:x=1", 4, "sum has no option 'x'. It has none."),
        ("mean:exact=yes", 11, "mean: exact must be true or false, got 'yes'"),
        ("mean:exact='true'", 11, "must be true or false"),
        ("options:levels=1.5", 15, "levels must be an integer, got '1.5'"),
        ("options:levels=0", 0, "levels=0 must be >= 1"),
        ("ef(options(ratio=2))", 3, "ratio=2.0 must be > 0 and <= 1"),
        ("options:ratio=nan", 0, "must be > 0 and <= 1"),
        ("options:mode=nearst", 13, "Did you mean 'nearest'?"),
        ("options:ratio=mean(exact=true)", 14, "ratio is a number, not a policy"),
        ("options:flag=true,flag=true", 18, "flag is given twice"),
        ("ef", 0, "ef needs inner, as in ef(mean)"),
        ("ef('mean')", 3, "its name is not quoted"),
        ("ef(sum)", 0, "ErrorFeedback cannot wrap Sum"),
        ("ef(ef(mean))", 0, "ErrorFeedback cannot wrap ErrorFeedback"),
        ("mean(bf16)", 5, "mean takes no further policy"),
        ("options(0.5)", 8, "unknown policy '0.5'"),
        ("ef(mean", 7, "',' or ')' is missing"),
        ("mean)", 4, "not expected after the end"),
        ("mean mean", 5, "not expected after the end"),
        ("mean:", 5, "a name or a value is missing"),
        ("ef(mean,)", 8, "a name or a value is missing"),
        ("partition(<x=mean)", 0, "write <1024"),
        ("partition(a=mean, a=sum)", 0, "rule 'a' is given twice"),
        ("partition(a=1)", 12, "unknown policy '1'"),
    ],
)
def test_an_error_marks_the_position(text: str, at: int, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_spec(text)
    said, shown, caret = str(caught.value).split("\n")
    assert message in said
    assert (shown, caret) == (f"  {text}", f"  {' ' * at}^")


def test_nesting_is_bounded() -> None:
    with pytest.raises(SpecError, match=f"deeper than {MAX_DEPTH}"):
        from_spec("fp16(" * 100_000)


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
rules = st.sampled_from(["*.bias", "<1024", ">=2d", "1d", "float32", "exact", "rules", "a b"]) | words.filter(
    lambda text: bool(text) and text != "rest" and text[0] not in "<>"
)
leaves = st.one_of(
    st.builds(Mean, st.booleans()),
    st.just(Sum()),
    st.builds(
        Options,
        ratio=st.floats(0, 1, exclude_min=True),
        levels=st.integers(1, 10**30),
        text=words,
        mode=st.sampled_from(["nearest", "stochastic"]),
        limit=st.none() | st.floats(allow_nan=False),
        flag=st.booleans(),
    ),
)


def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(Fp16, inner),
        st.builds(Bf16, inner),
        st.builds(ErrorFeedback, inner.filter(lambda p: p.additive)),
        st.builds(Warmup, inner, st.integers(0, 10**6), inner),
        st.builds(Partition, st.dictionaries(rules, inner, max_size=3).map(lambda d: tuple(d.items())), inner),
        st.builds(Options, other=inner),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(leaves, grow, max_leaves=6))
def test_printing_is_the_inverse_of_parsing(policy: Policy) -> None:
    text = to_spec(policy)
    assert from_spec(text) == policy
    assert to_spec(from_spec(text)) == text
    assert hash(from_spec(text)) == hash(policy)


pieces = st.sampled_from(["mean", "ef", "warmup", "partition", "options", "exact", "ratio", "=", ",", "(", ")", ":"])
signs = st.text("<>=,:()'\"\\0.1ae \n", max_size=3)
garbage = st.text(max_size=30) | st.lists(pieces | signs, max_size=12).map("".join)


@settings(max_examples=1000, deadline=None)
@given(garbage)
def test_garbage_raises_spec_error_only(text: str) -> None:
    try:
        policy = from_spec(text)
    except SpecError:
        return
    assert from_spec(to_spec(policy)) == policy


def test_options_are_checked_in_code_too() -> None:
    with pytest.raises(ConfigurationError, match="Options: ratio=0 must be > 0 and <= 1"):
        Options(ratio=0)
    with pytest.raises(ConfigurationError, match="Mean: exact='yes' must be true or false"):
        Mean("yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="levels=True must be an integer"):
        Options(levels=True)
    with pytest.raises(ConfigurationError, match="inner='mean' must be a policy"):
        Fp16("mean")  # type: ignore[arg-type]


def test_a_policy_is_returned_as_it_is() -> None:
    policy = Mean()
    assert from_spec(policy) is policy


def test_the_registry() -> None:
    assert policies.known() == sorted([*policies.BUILT_IN, "options"])
    assert list(policies.BUILT_IN) == sorted(policies.BUILT_IN)
    assert register("options", Options) is Options
    with pytest.raises(ConfigurationError, match="taken by Options"):
        register("options", Mean)
    with pytest.raises(ConfigurationError, match="taken by dense:Mean"):
        register("mean", Options)
    with pytest.raises(ConfigurationError, match="lower-case"):
        register("My Policy", Options)
    with pytest.raises(ConfigurationError, match="no subclass"):
        register("thing", int)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="Nothing"):
        policies.Nothing  # noqa: B018


def test_a_policy_without_a_name_cannot_be_printed() -> None:
    @dataclass(frozen=True)
    class Nameless(Policy): ...

    with pytest.raises(ConfigurationError, match="Nameless has no name"):
        to_spec(Fp16(Nameless()))


def test_an_installed_package_brings_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("borrowed", f"{Mean.__module__}:Mean", policies.ENTRY_POINTS)
    monkeypatch.setattr(policies, "_installed", lambda: {"borrowed": entry})
    assert "borrowed" in policies.known()
    with pytest.raises(ConfigurationError, match=r"the name 'borrowed' is taken by .*dense:Mean"):
        register("borrowed", Options)
    assert from_spec("borrowed:exact=true") == Mean(exact=True)


def test_a_broken_package_leaves_other_policies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("broken", "no_such_package.policies:Broken", policies.ENTRY_POINTS)
    monkeypatch.setattr(policies, "_installed", lambda: {"broken": entry})

    @dataclass(frozen=True)
    class Nameless(Policy): ...

    assert policies.label(Nameless()).endswith("Nameless()")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        from_spec("broken")
