package config

// Receipts is the hash chain of a run.
type Receipts struct {
	// Receipt is the file: what the results depend on, and every ReceiptEvery steps the data,
	// learning rates and losses since, with a hash of all states; "" writes none. The chain
	// is the same at every stage and, with Reproducible, at every number of ranks. With Resume
	// "" goes on in the receipt that the checkpoint names, if it has one.
	Receipt string
	// ReceiptEvery is the steps between its lines; 0: SaveEvery or, where that is 0, 100.
	// Each checkpoint has one as well.
	ReceiptEvery int
}

// defaultReceiptEvery is the steps between lines of a run that does not save either.
const defaultReceiptEvery = 100

// ReceiptSteps is the steps between lines of the receipt.
func (c *Config) ReceiptSteps() int {
	for _, n := range []int{c.ReceiptEvery, c.SaveEvery} {
		if n > 0 {
			return n
		}
	}
	return defaultReceiptEvery
}
