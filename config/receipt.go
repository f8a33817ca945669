package config

// Receipts configures the receipt, which is the hash chain of a run.
type Receipts struct {
	// Receipt is the receipt file; "" writes none. It records what the results depend on, and
	// every ReceiptEvery steps the data, learning rates and losses since the last line, with a
	// hash of all states. The chain is the same at every stage and, with Reproducible, at every
	// number of ranks. With Resume, "" continues the receipt that the checkpoint names, if it
	// names one.
	Receipt string
	// ReceiptEvery is the number of steps between lines; 0: SaveEvery, or 100 if that is 0 too.
	// Each checkpoint also has a line.
	ReceiptEvery int
}

// defaultReceiptEvery is the number of steps between lines if neither ReceiptEvery nor
// SaveEvery is set.
const defaultReceiptEvery = 100

// ReceiptSteps is the number of steps between lines of the receipt.
func (c *Config) ReceiptSteps() int {
	for _, n := range []int{c.ReceiptEvery, c.SaveEvery} {
		if n > 0 {
			return n
		}
	}
	return defaultReceiptEvery
}
