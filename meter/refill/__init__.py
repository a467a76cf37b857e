"""What a quota store that came back empty starts from: what the ledger and this process's journal know was used."""
