"""What was used: records, prices, the journal on local disk, the shipper, the tables, what finance asks."""
