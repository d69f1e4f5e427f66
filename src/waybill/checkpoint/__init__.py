"""What lies on disk: JSON files, safetensors headers, the index, byte ranges. Describing it reads no weight byte."""

from waybill.checkpoint.folder import Checkpoint, Shard, read_checkpoint
from waybill.checkpoint.header import TensorHeader
from waybill.checkpoint.reader import RangeReader

__all__ = ["Checkpoint", "RangeReader", "Shard", "TensorHeader", "read_checkpoint"]
