"""What ``optimize`` returns: graphs as code, run while all they took for granted holds."""
