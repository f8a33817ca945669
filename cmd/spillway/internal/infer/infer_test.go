package infer

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The progress of an evaluation: its batches, the predicted remaining time after the first, and the
// message of a signal.
func TestEvalProgress(t *testing.T) {
	var out strings.Builder
	p := newEvalProgress(&out)
	require.Equal(t, "interrupted in the first batch", p.reached())
	p.batch(1, 9, 2.5)
	require.Empty(t, out.String(), "a short one says nothing in a pipe")
	p.told = p.told.Add(-time.Hour)
	p.pace.Began = p.pace.Began.Add(-time.Hour)
	p.batch(4, 9, 2.25)
	require.Regexp(t, `^batch 4/9  loss 2\.2500  1h40m[0-9]+s left\n$`, out.String())
	p.batch(5, 9, 2)
	require.Equal(t, 1, strings.Count(out.String(), "\n"))
	require.Equal(t, "interrupted after batch 5 of 9", p.reached())
	p.beat()
	p.told, p.since = p.told.Add(-time.Hour), p.since.Add(-time.Minute)
	p.beat()
	p.beat()
	require.Regexp(t, `\nbatch 6/9 … 60\.0 s\n$`, out.String(), "a batch that takes long is told")
}
