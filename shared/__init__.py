"""What two services really share: contracts, settings, stores, authentication, errors. No rule of one service."""
