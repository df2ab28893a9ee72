"""The Amazon SQS API as bytes: JSON and Query, errors, addresses, signatures."""
