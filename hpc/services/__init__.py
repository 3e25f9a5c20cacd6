"""Services outside the cluster: messages to people, and the trackers that get a run's metrics. Runs anywhere."""
