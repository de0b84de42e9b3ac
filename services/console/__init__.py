"""People: the `waybill` command, the operators' API and page, the demo."""
