"""Handing a dataset over to trainers: one small file for each, one list of all of them."""

from spanmill.triplets.exports.exporting import TARGETS, export
from spanmill.triplets.exports.report import Report
from spanmill.triplets.exports.target import Fill, Target

__all__ = ["TARGETS", "Fill", "Report", "Target", "export"]
