"""`waybill demo`: real clients on a real stack, parts killed on the way, and a verdict against what Postgres holds."""
