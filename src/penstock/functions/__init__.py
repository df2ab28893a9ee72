"""AWS Lambda's event source mapping for SQS, for a function on this machine: `penstock lambda`."""
