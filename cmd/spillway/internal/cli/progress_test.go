package cli

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Without a terminal a line every 1.5 s describes the computation, until the end.
func TestProgressInAPipe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := NewProgress(&out)
		p.End()
		p.Says("planning …")
		time.Sleep(time.Second)
		p.Says("searching …")
		time.Sleep(2500 * time.Millisecond)
		p.End()
		p.End()
		require.Equal(t, "searching … 1.5 s\nsearching … 3.0 s\n", out.String())
		p.Says("planning …") // ends before a line is due
		p.End()
		time.Sleep(time.Minute)
		require.Equal(t, "searching … 1.5 s\nsearching … 3.0 s\n", out.String())
		var none *Progress
		none.Says("nothing")
		none.End()
	})
}
