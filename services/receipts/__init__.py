"""Acks to marks: delivered and read, which never go back, and the receipts that tell of them."""
