"""One model in several processes: its shards, and what the processes do together."""
