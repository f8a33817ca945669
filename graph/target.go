package graph

// Target is pure data that describes a device to the passes: how memory is
// aligned, and what its kernels need as scratch. Each kernel package has a test
// that its own numbers equal these.
type Target struct {
	Name  string
	Align int64 // bytes: offsets of buffers in an arena are multiples of it

	// Limbs is the int64 words of an exact accumulator (SqSum, ParamNorms).
	Limbs int64
	// HeadRows is the rows of a chunk of HeadLoss and HeadLossGrad, whose logits
	// are held at once. It is a multiple of the matrix product's K-block, so that
	// the head's weight gradient, accumulated over chunks, has the same bits as
	// one product over all rows.
	HeadRows int64
}
