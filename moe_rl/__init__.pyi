from moe_rl.megatron.microbatch import pack as pack
from moe_rl.megatron.model import replay_session as replay_session
from moe_rl.megatron.specs import replay_spec as replay_spec
from moe_rl.models.hf import read_model as read_model
from moe_rl.objectives.advantages import advantages as advantages
from moe_rl.objectives.logprobs import token_logprobs as token_logprobs
from moe_rl.objectives.losses import global_denominator as global_denominator
from moe_rl.objectives.losses import policy_loss as policy_loss
from moe_rl.objectives.losses import reference_kl as reference_kl
from moe_rl.objectives.mismatch import MismatchSums as MismatchSums
from moe_rl.replay.batch_check import check_batch as check_batch
from moe_rl.replay.choice import replay_topk as replay_topk
from moe_rl.replay.router_audit import audit as audit
from moe_rl.replay.router_audit import row_places as row_places
from moe_rl.replay.session import ReplaySession as ReplaySession
from moe_rl.trace import TraceSpec as TraceSpec
from moe_rl.trace import TraceStore as TraceStore
from moe_rl.trace import validate as validate
from moe_rl.types import Sequence as Sequence
from moe_rl.vllm.offline import record as record

__version__: str
