"""The public contracts: what a frame, a body and a record may look like, and what is wrong with one that may not."""
