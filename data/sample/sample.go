// Package sample defines the interface of a data set that a program provides.
package sample

// Samples is a data set that a program provides. Its methods may be called concurrently and
// must always return the same values.
type Samples interface {
	// Len returns the number of samples, at least 1.
	Len() int64
	// Sample fills a row with sample i, 0 ≤ i < Len. Elements that it does not set are 0, and
	// targets -1.
	Sample(i int64, r *Row) error
}

// TargetCounter is implemented by Samples that can count their targets without computing them. The
// loss is a mean over the counted targets of the complete step, and their number must be known
// before its first micro-batch. Without this interface each sample of a step is therefore computed
// twice.
type TargetCounter interface {
	Samples
	// CountTargets returns how many targets of sample i are not -1.
	CountTargets(i int64) int
}

// Row is the memory for one sample of a micro-batch.
type Row struct {
	Tokens  []int32 // nil if the model has no token input
	Targets []int32 // -1 is ignored in the loss and in its count; nil if the model has no targets
	Inputs  []Input
}

// Input returns this sample's elements, row-major, of the named float input of the model
// (graph.Builder.Input); nil if the model has no such input.
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
