"""The plain design that Waybill is measured against."""
