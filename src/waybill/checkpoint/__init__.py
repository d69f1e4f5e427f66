"""What lies on disk: JSON files, headers of weight files, indices, byte ranges. Describing it reads no weight byte."""

from waybill.checkpoint.folder import Checkpoint, Shard
from waybill.checkpoint.header import TensorHeader
from waybill.checkpoint.opening import read_checkpoint
from waybill.checkpoint.reader import RangeReader

__all__ = ["Checkpoint", "RangeReader", "Shard", "TensorHeader", "read_checkpoint"]
