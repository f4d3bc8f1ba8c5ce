"""What every case is measured with: processes, contenders in turn, meters, tables, results."""
