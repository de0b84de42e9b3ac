"""How Waybill is set up: migrations, the local stack, the generated reference."""
