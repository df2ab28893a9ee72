"""The Amazon SQS API, served."""
