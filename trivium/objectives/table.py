"""Every objective by its name."""

from __future__ import annotations

from trivium.objectives.causal import Causal
from trivium.objectives.denoise import Denoise
from trivium.objectives.masked import Masked
from trivium.objectives.objective import Objective
from trivium.objectives.prefix import Prefix
from trivium.objectives.seq2seq import Seq2Seq
from trivium.objectives.spans import Spans

OBJECTIVES: dict[str, type[Objective]] = {
    "causal": Causal,
    "masked": Masked,
    "spans": Spans,
    "denoise": Denoise,
    "prefix": Prefix,
    "seq2seq": Seq2Seq,
}
