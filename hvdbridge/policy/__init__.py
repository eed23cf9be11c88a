"""What an aggregation policy is, without I/O: collectives, buckets, the base class, the grammar of specs."""

from hvdbridge.policy.base import Aggregated as Aggregated
from hvdbridge.policy.base import Early as Early
from hvdbridge.policy.base import Exchange as Exchange
from hvdbridge.policy.base import Flow as Flow
from hvdbridge.policy.base import Policy as Policy
from hvdbridge.policy.base import Slot as Slot
from hvdbridge.policy.base import State as State
