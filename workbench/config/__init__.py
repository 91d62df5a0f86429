"""What an engine is configured with: its toggles, presets of them, and all else it is built with.

`table.py` says everything about a toggle, a row each. The names that other rooms use are these.
"""

from workbench.config.engine import CACHE_TYPES as CACHE_TYPES
from workbench.config.engine import EXPAND as EXPAND
from workbench.config.engine import NVTX as NVTX
from workbench.config.engine import EngineConfig as EngineConfig
from workbench.config.engine import parse_override as parse_override
from workbench.config.presets import BASELINE as BASELINE
from workbench.config.presets import BEST as BEST
from workbench.config.table import EXACT as EXACT
from workbench.config.table import FAMILIES as FAMILIES
from workbench.config.table import ROUNDING as ROUNDING
from workbench.config.table import Activations as Activations
from workbench.config.table import AttnKernel as AttnKernel
from workbench.config.table import BatchSizes as BatchSizes
from workbench.config.table import BranchFusion as BranchFusion
from workbench.config.table import CopyStream as CopyStream
from workbench.config.table import Defrag as Defrag
from workbench.config.table import Fork as Fork
from workbench.config.table import GraphReuse as GraphReuse
from workbench.config.table import Half as Half
from workbench.config.table import HostSource as HostSource
from workbench.config.table import InputOrder as InputOrder
from workbench.config.table import KVCacheKind as KVCacheKind
from workbench.config.table import KVGrowth as KVGrowth
from workbench.config.table import KVParts as KVParts
from workbench.config.table import LaunchAhead as LaunchAhead
from workbench.config.table import Lifetimes as Lifetimes
from workbench.config.table import NCopies as NCopies
from workbench.config.table import Pdl as Pdl
from workbench.config.table import PlanBatch as PlanBatch
from workbench.config.table import PlanEnd as PlanEnd
from workbench.config.table import PlanEvict as PlanEvict
from workbench.config.table import PlanRule as PlanRule
from workbench.config.table import PlanScope as PlanScope
from workbench.config.table import PlanWarmup as PlanWarmup
from workbench.config.table import Redo as Redo
from workbench.config.table import Results as Results
from workbench.config.table import SampleOn as SampleOn
from workbench.config.table import SkipGate as SkipGate
from workbench.config.table import SkipMaskedKV as SkipMaskedKV
from workbench.config.table import SlotChoice as SlotChoice
from workbench.config.table import StepWait as StepWait
from workbench.config.table import Streams as Streams
from workbench.config.table import Switch as Switch
from workbench.config.table import SyncMode as SyncMode
from workbench.config.table import Validate as Validate
from workbench.config.toggles import TogglePreset as TogglePreset
from workbench.config.toggles import Toggles as Toggles
from workbench.config.toggles import asked_toggles as asked_toggles
from workbench.config.toggles import differing as differing
from workbench.config.toggles import folded as folded
from workbench.config.toggles import parse_changes as parse_changes
from workbench.config.toggles import said_toggles as said_toggles
