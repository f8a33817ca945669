// Package sample says what a data set is that a program brings along.
package sample

// Samples is a data set that a program brings along. Its methods may be called at the
// same time, and give the same whenever they are.
type Samples interface {
	// Len is the number of samples, at least 1.
	Len() int64
	// Sample fills a row with sample i, 0 ≤ i < Len. What it leaves out is 0, and -1
	// among the targets.
	Sample(i int64, r *Row) error
}

// TargetCounter is Samples that count their targets without making them. Otherwise each
// sample of a step is made twice: the loss is a mean over the counted targets of the
// whole step, which is known before its first micro-batch.
type TargetCounter interface {
	Samples
	// CountTargets is how many targets of sample i are not -1.
	CountTargets(i int64) int
}

// Row is the place for a sample in a micro-batch.
type Row struct {
	Tokens  []int32 // nil where the model has none
	Targets []int32 // -1 is ignored in the loss and in its count; nil where the model has none
	Inputs  []Input
}

// Input is the elements, row-major, of the input that the model calls name
// (graph.Builder.Input) which are this sample's; nil where the model has none of that
// name.
func (r *Row) Input(name string) []float32 {
	for i := range r.Inputs {
		if r.Inputs[i].Name == name {
			return r.Inputs[i].Values
		}
	}
	return nil
}

// Input is a model's float input.
type Input struct {
	Name   string
	Values []float32
}
