"""Benchmarks: Waybill and a reference, side by side in one run."""
