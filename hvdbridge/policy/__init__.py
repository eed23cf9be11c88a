"""What an aggregation policy is, without I/O: collectives, buckets, the base class, the grammar of specs."""

from hvdbridge.policy.base import BYTEWISE_MB as BYTEWISE_MB
from hvdbridge.policy.base import CODED_MB as CODED_MB
from hvdbridge.policy.base import Aggregated as Aggregated
from hvdbridge.policy.base import Early as Early
from hvdbridge.policy.base import Exchange as Exchange
from hvdbridge.policy.base import Flow as Flow
from hvdbridge.policy.base import Policy as Policy
from hvdbridge.policy.base import Slot as Slot
from hvdbridge.policy.base import State as State
from hvdbridge.policy.base import advance as advance
from hvdbridge.policy.base import check_weights as check_weights
from hvdbridge.policy.base import finish as finish
from hvdbridge.policy.base import rewrite as rewrite
from hvdbridge.policy.base import too_early as too_early
