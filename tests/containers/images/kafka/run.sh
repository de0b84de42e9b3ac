#!/bin/bash
# KAFKA_LOG_DIRS becomes log.dirs; only what tests/containers/stores.py sets has to work.
set -euo pipefail

settings=/opt/kafka/config/server.properties
while IFS='=' read -r name value; do
    key=${name#KAFKA_}
    key=${key,,}
    echo "${key//_/.}=$value"
done < <(env | grep '^KAFKA_') >"$settings"
grep -q '^log\.dirs=' "$settings" || echo 'log.dirs=/var/lib/kafka/data' >>"$settings"

java=(java -Xms128m -Xmx384m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*')
"${java[@]}" kafka.tools.StorageTool format --ignore-formatted --config "$settings" \
    --cluster-id "${CLUSTER_ID:-4L6g3nShT-eMCtK--X86sw}"
exec "${java[@]}" kafka.Kafka "$settings"
