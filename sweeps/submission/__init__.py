"""Launch, retry and cancel: which runs need a job, and how they are submitted."""
