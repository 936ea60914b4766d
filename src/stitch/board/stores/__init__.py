"""Object stores: the port and what implements it, addresses, credentials, signatures, a probe."""
