"""Marks and counts compared with what they are made from, and mended: `waybill check`."""
