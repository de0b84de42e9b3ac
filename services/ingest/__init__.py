"""A send becomes an event: the HTTP door and the group-commit writer."""
