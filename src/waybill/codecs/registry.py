"""Which codec reads which layout: a closed table."""

from __future__ import annotations

from waybill.codecs.awq import AWQ
from waybill.codecs.compressed_tensors import CompressedTensors
from waybill.codecs.fp8 import FP8
from waybill.codecs.gptq import GPTQ
from waybill.codecs.mxfp4 import MXFP4
from waybill.codecs.olive import Olive
from waybill.codecs.protocol import QuantizationCodec

CODECS: dict[str, QuantizationCodec] = {
    "gptq": GPTQ(),
    "awq": AWQ(),
    "olive": Olive(),
    "compressed-tensors": CompressedTensors(),
    "fp8": FP8(),
    "mxfp4": MXFP4(),
}
"""By the method of a QuantizationConfig, which the metadata's reader has already refused when unknown."""
