package config

// defaultReceiptEvery is the number of steps between lines if neither ReceiptEvery nor
// SaveEvery is set.
const defaultReceiptEvery = 100

// ReceiptSteps returns the number of steps between lines of the receipt.
func (c *Config) ReceiptSteps() int {
	for _, n := range []int{c.ReceiptEvery, c.SaveEvery} {
		if n > 0 {
			return n
		}
	}
	return defaultReceiptEvery
}
