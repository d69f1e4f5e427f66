"""Rules as data: how names and pieces on disk become the names and pieces a target asks for."""

from waybill.rules.table import Drop, DropUnder, Move, Place, RuleTable

__all__ = ["Drop", "DropUnder", "Move", "Place", "RuleTable"]
