"""The waybill: what a target needs, where each piece comes from, what it costs, and everything that is wrong."""

from waybill.plan.bill import Binding, Plan
from waybill.plan.parameter import ParameterSpec, Part, Shard
from waybill.plan.planner import make_plan
from waybill.plan.target import Target

__all__ = ["Binding", "ParameterSpec", "Part", "Plan", "Shard", "Target", "make_plan"]
