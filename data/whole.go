package data

// Whole arranges a source in rows of seq tokens so that each target occurs once. rows must be
// at least WholeRows. The last rows are padded with tokens 0, whose targets do not count.
func Whole(src Source, seq int, rows int64) TargetSource {
	return &whole{src, rows*int64(seq) + 1}
}

// WholeRows returns how many rows of seq tokens hold every target of a source.
func WholeRows(src Source, seq int) int64 { return (src.Len() - 1 + int64(seq) - 1) / int64(seq) }

type whole struct {
	src Source
	n   int64
}

func (w *whole) Len() int64 { return w.n }

func (w *whole) Tokens(dst []int32, start int64) error {
	n := min(int64(len(dst)), max(w.src.Len()-start, 0))
	clear(dst[n:])
	return w.src.Tokens(dst[:n], min(start, w.src.Len()))
}

// Targets returns the next tokens, and -1 after the last.
func (w *whole) Targets(dst []int32, start int64) error {
	next := start + 1
	n := min(int64(len(dst)), max(w.src.Len()-next, 0))
	for i := n; i < int64(len(dst)); i++ {
		dst[i] = -1
	}
	if n == 0 {
		return nil
	}
	if t, ok := w.src.(TargetSource); ok {
		return t.Targets(dst[:n], start)
	}
	return w.src.Tokens(dst[:n], next)
}
