"""The host: it starts and watches engine cores, keeps leases, publishes statistics and cleans up."""
