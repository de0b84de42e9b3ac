"""Acks in, marks and receipts out (design: delivered and read never go back)."""
