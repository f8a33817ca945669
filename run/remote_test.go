package run

import (
	"errors"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// Why a stream has ended is told to who calls, and once: the remotes' Close has
// nothing to add, unless nobody was told.
func TestAStreamsEndIsToldOnce(t *testing.T) {
	open := func() (*Link, []*remote) {
		here, there := net.Pipe()
		t.Cleanup(func() { _ = there.Close() })
		link := NewLink(2, here)
		c := newChannel(link)
		p := &graph.Program{}
		return link, []*remote{c.remote(2, p), c.remote(3, p)}
	}
	why := errors.New("the job has ended")

	link, ranks := open()
	link.Break(why)
	_, err := ranks[0].Scalar(0)
	require.Equal(t, why, err, "the cause, not that a message could not be sent")
	for _, r := range ranks {
		require.NoError(t, r.Close())
	}

	link, ranks = open()
	link.Break(why)
	require.ErrorIs(t, ranks[0].Close(), why)
	require.NoError(t, ranks[1].Close())
}
