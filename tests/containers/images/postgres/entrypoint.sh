#!/bin/bash
set -euo pipefail

# Arguments alone are the server's.
case "${1:-}" in -*) set -- postgres "$@" ;; esac

if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA"
    chown -R postgres:postgres /var/lib/postgresql
    exec setpriv --reuid postgres --regid postgres --clear-groups "$0" "$@"
fi

if [ ! -e "$PGDATA/PG_VERSION" ]; then
    user=${POSTGRES_USER:-postgres}
    database=${POSTGRES_DB:-$user}
    : "${POSTGRES_PASSWORD:?must be set}"
    initdb --pgdata "$PGDATA" --username "$user" --pwfile <(echo "$POSTGRES_PASSWORD") \
        --auth-local trust --auth-host scram-sha-256
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
    # In single-user mode nobody can connect before the server has all of this.
    [ "$database" = postgres ] || echo "CREATE DATABASE \"$database\"" | postgres --single -D "$PGDATA" postgres
fi

exec "$@"
