package run

import (
	"encoding/gob"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/exec"
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

// What travels between processes can: gob looks at a message's types only when the
// first is sent.
func TestMessagesCanBeSent(t *testing.T) {
	for _, m := range []any{request{Host: []hostData{{}}, Err: &wireError{}}, reply{Found: newFound(&exec.NonFinite{}), Err: &wireError{}, State: &state{}}, Hello{}, Task{}, opened{}} {
		require.NoError(t, gob.NewEncoder(io.Discard).Encode(m), "%T", m)
	}
}
