package run

import (
	"encoding/gob"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// The first call after a stream ends returns the cause. Close returns it only if no call has
// returned it before.
func TestAStreamsEndIsToldOnce(t *testing.T) {
	open := func() (*Link, []*remote) {
		here, there := net.Pipe()
		t.Cleanup(func() { _ = there.Close() })
		link := NewLink(2, here)
		c := newChannel(link)
		role := &plan.Role{Program: &graph.Program{}}
		return link, []*remote{c.remote(2, role), c.remote(3, role)}
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

// While processes meet, one that sends nothing for the timeout ends the meeting, before its Hello
// as well as before the Task. One that is merely slow does not.
func TestMeeting(t *testing.T) {
	defer func(d time.Duration) { meetEvery = d }(meetEvery)
	meetEvery = 10 * time.Millisecond
	const timeout = 500 * time.Millisecond
	free := func(_ string, h *Hello) { h.Disk = 7 }
	open := func() (leader, other *Link) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		require.NoError(t, err)
		var ends []net.Conn
		for _, fd := range fds {
			f := os.NewFile(uintptr(fd), "stream")
			c, err := net.FileConn(f)
			require.NoError(t, err)
			require.NoError(t, f.Close())
			t.Cleanup(func() { _ = c.Close() })
			ends = append(ends, c)
		}
		return NewLink(2, ends[0]), NewLink(0, ends[1])
	}
	where := func() string { return "host h, process 7" }

	leader, _ := open()
	leader.Meet(timeout, where)
	_, err := leader.Welcome()
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.EqualError(t, err, "timeout: rank 2 (host h, process 7) has not joined the job within 500ms")

	_, other := open()
	other.Meet(timeout, nil)
	_, err = other.Greet(Hello{Rank: 2}, free)
	require.EqualError(t, err, "timeout: rank 0 has not joined the job within 500ms")

	leader, other = open()
	leader.Meet(timeout, nil)
	require.True(t, other.beat(Hello{Here: "host g, process 8"})) // and nothing more
	_, err = leader.Welcome()
	require.EqualError(t, err, "timeout: rank 2 (host g, process 8) has not joined the job within 500ms")

	leader, other = open()
	leader.Meet(timeout, where)
	other.Meet(timeout, where)
	told := make(chan Task, 1)
	go func() {
		time.Sleep(2 * timeout)
		task, err := other.Greet(Hello{Rank: 2, Host: "g"}, free)
		if err != nil {
			task.Err = err.Error()
		}
		told <- task
	}()
	h, err := leader.Welcome()
	require.NoError(t, err)
	require.Equal(t, Hello{Rank: 2, Host: "g"}, h)
	require.NoError(t, leader.Assign(Task{Disk: "d"}))
	h, err = leader.Welcome()
	require.NoError(t, err)
	require.Equal(t, Hello{Rank: 2, Host: "g", Disk: 7}, h)
	time.Sleep(2 * timeout)
	require.NoError(t, leader.Assign(Task{Program: "p"}))
	require.Equal(t, Task{Program: "p"}, <-told)
	require.NoError(t, leader.send(request{ID: 1})) // the meeting must not consume what follows it
	var q request
	require.NoError(t, other.receive(&q))
	require.Equal(t, uint64(1), q.ID)
}

// gob can encode every type of message. gob checks a type only when its first value is sent.
func TestMessagesCanBeSent(t *testing.T) {
	for _, m := range []any{request{Host: []hostData{{}}, Err: &wireError{}}, reply{Found: newFound(&exec.NonFinite{}), Err: &wireError{}, State: &state{}}, Hello{}, Task{}, opened{}} {
		require.NoError(t, gob.NewEncoder(io.Discard).Encode(m), "%T", m)
	}
}
