"""Made-up results, whole."""

MACHINE = {"cpu": "A CPU", "cores": 2, "memory_gib": 8.0, "system": "Linux 6", "python": "3.11.7"}


def of(name: str) -> dict[str, object]:
    ends: dict[str, object] = {
        "machine": MACHINE,
        "date": "2026-01-02T03:04:05+00:00",
        "command": f"waybill bench {name}",
    }
    return {**{"send": _SEND, "e2e": _E2E, "relay": _RELAY, "gateway": _GATEWAY, "receipts": _RECEIPTS}[name], **ends}


def _figures(rate_s: float, ms: float, unsent: float) -> dict[str, float]:
    return {"rate_s": rate_s, "p50_ms": ms, "p99_ms": ms * 3, "unsent_at_end": unsent}


def _ratio(value: float) -> dict[str, float]:
    return {"rate_s": value, "p50_ms": value, "p99_ms": value}


_SEND: dict[str, object] = {
    "name": "send",
    "waybill": _figures(6123.4, 300.0, 120.0),
    "peer": _figures(1000.0, 1800.0, 4000.0),
    "ratio": _ratio(6.12),
    "peer_after_commit": _figures(700.0, 2500.0, 50.0),
    "peer_at_once": _figures(2500.0, 700.0, 5000.0),
    "ratio_at_once": _ratio(2.46),
    "writer_only": {
        "waybill": _figures(5000.0, 350.0, 0.0),
        "peer": _figures(1100.0, 1700.0, 0.0),
        "ratio": _ratio(4.55),
        "peer_at_once": _figures(2600.0, 690.0, 0.0),
        "ratio_at_once": _ratio(1.92),
    },
    "single_requests": {
        "waybill": _figures(650.0, 50.0, 0.0),
        "peer": _figures(500.0, 60.0, 0.0),
        "ratio": _ratio(1.3),
    },
    "settings": {"pool": 8, "chats": 200, "batch": 250, "in_flight": 8, "warm_s": 2.0, "measure_s": 8.0, "rounds": 3},
}

_E2E: dict[str, object] = {
    "name": "e2e",
    "waybill": {
        "p50_ms": 12.0,
        "p99_ms": 25.0,
        "sent_p50_ms": 7.0,
        "sent_p99_ms": 15.0,
        "sent_to_event_p50_ms": 5.0,
        "sent_to_event_p99_ms": 11.0,
        "repeated": 0.0,
        "disordered": 0.0,
        "started_late_p99_ms": 1.0,
    },
    "peer": {"p50_ms": 1510.0, "p99_ms": 2990.0, "commit_p50_ms": 2.0, "repeated": 0.0, "disordered": 4.0},
    "ratio": {"p50_ms": 125.83, "p99_ms": 119.6},
    "peer_after_commit": {"p50_ms": 4.0, "p99_ms": 9.0, "commit_p50_ms": 2.0, "repeated": 1.0, "disordered": 17.0},
    "ratio_after_commit": {"p50_ms": 0.33, "p99_ms": 0.36},
    "settings": {"pool": 8, "users": 20, "chats": 50, "rate_s": 200.0, "warm_s": 3.0, "measure_s": 12.0, "rounds": 3},
}


def _relay(drain: float, ms: float, cpu: float) -> dict[str, float]:
    return {
        "drain_rows_s": drain,
        "p50_ms": ms,
        "p99_ms": ms * 3,
        "cpu_s_per_million": cpu,
        "rss_mb": 90.0,
        "idle_cpu": 3.0,
        "p50_ms_at_5000": ms,
        "p99_ms_at_5000": ms * 4,
        "cpu_s_per_million_at_1000": cpu * 20,
        "cpu_s_per_million_at_5000": cpu * 8,
    }


_RELAY: dict[str, object] = {
    "name": "relay",
    "waybill": _relay(120_000, 4.5, 7.0),
    "peer": _relay(25_000, 10.0, 70.0),
    "ratio": {"drain_rows_s": 4.8, "p50_ms": 2.22, "cpu_s_per_million": 10.0},
    "peer_tuned": _relay(24_000, 4.4, 68.0),
    "ratio_tuned": {"drain_rows_s": 5.0, "p50_ms": 7.31},
    "deep": {"rows": 5_000_000, "drain_rows_s": 110_000, "rss_first_mb": 91.0, "rss_last_mb": 92.0, "rss_mb": 97.0},
    "settings": {
        "peer": "debezium",
        "alone": False,
        "rounds": 3,
        "seconds": 12.0,
        "backlog": 200_000,
        "deep": 5_000_000,
    },
}


def _gateway(cpu: float, rate: float, kib: float) -> dict[str, float]:
    return {
        "a_cpu_us": cpu,
        "a_p99_ms": 9.5,
        "b_cpu_us": cpu * 3,
        "b_p99_ms": 12.0,
        "c_deliveries_s": rate,
        "c_cpu_us": cpu / 11,
        "d_kib_per_session": kib,
        "e_seconds": 0.64,
        "e_cpu_us": 120.0,
    }


_GATEWAY: dict[str, object] = {
    "name": "gateway",
    "waybill": _gateway(8.0, 1_200_000, 12.5)
    | {"e_without_postgres": 0.875, "send_p50_ms": 11.0, "send_p99_ms": 33.3, "sent_p99_ms": 22.2}
    | {"stalled_kib": 41.0, "stalled_kernel_kib": 60.0},
    "peer": _gateway(12.0, 1_000_000, 25.0),
    "ratio": {"a_cpu_us": 1.5, "c_deliveries_s": 1.2, "d_kib_per_session": 2.0},
    "errors": {},
    "turns": {"waybill": [{"a_postgres_behind_ms": 14.0, "d_postgres_behind_ms": 0.0}], "peer": [{}]},
    "settings": {"peer": "gateway", "alone": False, "rounds": 3, "seconds": 15.0, "scale": 1.0},
}


def _receipts(rate: float, ms: float) -> dict[str, float]:
    return {
        "rate_s": rate,
        "cpu_s_per_million": 20.0,
        "postgres_cpu_s_per_million": 11.0,
        "rate_s_wide": rate / 2,
        "cpu_s_per_million_wide": 60.0,
        "rows_announced": 33_345.0,
        "p50_ms": ms,
        "p99_ms": ms * 3,
    }


_RECEIPTS: dict[str, object] = {
    "name": "receipts",
    "waybill": _receipts(42_000, 18.5),
    "peer": _receipts(5_500, 9.0),
    "ratio": {"rate_s": 7.31, "rate_s_wide": 3.0, "p50_ms": 0.49},
    "peer_parallel": {"rate_s": 4_700.0},
    "ratio_parallel": {"rate_s": 8.9},
    "growth": {
        "mib_per_million": {"event": 455.7, "transition": 458.3, "receipt": 5.2, "member": 0.0},
        "mib_per_million_in_all": 919.2,
        "dead_rows": {"receipt": 1934.0},
        "transitions_per_message": {"delivered": 2.67, "read": 1.02},
    },
    "turns": {},
    "settings": {"acks": 200_000, "seconds": 8.0, "rate": 500.0, "messages": 6_000, "rounds": 3},
}
