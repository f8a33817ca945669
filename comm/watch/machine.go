// Package watch decides when a job of several processes has lost a rank. Machine does no
// I/O: its inputs are the time and the ranks' reports, and its outputs are verdicts. A
// transport carries the reports and acts on the verdicts.
package watch

import (
	"fmt"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/comm"
)

// Phase is the phase of an operation in which a rank is.
type Phase uint8

// Phases, in the order in which an operation passes them.
const (
	Idle    Phase = iota // between operations
	Waiting              // has arrived; waits for the others to arrive
	Moving               // moves bytes
	Leaving              // has moved its bytes; waits for the others to finish
)

func (p Phase) String() string {
	return [...]string{"idle", "waiting", "moving", "leaving"}[p&3]
}

// State is the known state of a rank's process.
type State uint8

// States of a process.
const (
	Absent State = iota // has not joined yet
	Alive
	Done // has ended without error
	Dead
)

// Progress is a rank's place in one group.
type Progress struct {
	Call  uint64 // collectives begun
	Phase Phase
	Sig   uint64 // hash of the current operation's signature; must be equal on all ranks
	Op    string // the current operation, for messages
}

// Report is the state that a rank reports.
type Report struct {
	State State
	Beat  uint64     // changes as long as the process runs
	In    []Progress // by slot: the rank's groups, one a mesh axis and the world
	// Point is the current Send or Recv, with Peer.
	Point Progress
	Peer  int
}

// Group is a group's ranks, and the slot of Report.In that holds their progress in it.
type Group struct {
	Name  string // "world", "axis data"
	Slot  int
	Ranks []int
}

// Config describes the job to a Machine.
type Config struct {
	World  int
	Groups []Group
	// Interval is the time between observations. A longer gap between two of them
	// is a pause of this process, and counts as one interval.
	Interval time.Duration
	Silent   time.Duration // a rank whose Beat has not changed for this long gets a warning
	Timeout  time.Duration // a silent rank, or one that others wait for, ends the job after this
	// Where returns a rank's host and process for messages; nil: messages omit them.
	Where func(rank int) string
}

// Kind of a verdict.
type Kind uint8

// Kinds of verdicts.
const (
	Named Kind = iota // a rank is silent (a warning)
	Back              // a silent rank reports again
	End               // the job must end
)

// Verdict is a finding of the machine.
type Verdict struct {
	Kind  Kind
	Ranks []int // the ranks concerned
	Text  string
	Err   error // of an End: wraps comm.ErrTimeout, comm.ErrMismatch or comm.ErrLost
}

// Machine watches a job. Its clock stops while the process is paused: it advances by at
// most twice the interval between two observations.
type Machine struct {
	c       Config
	started bool
	last    time.Duration
	clock   time.Duration
	beats   []beat
	moves   [][]move // last change of progress, by rank and slot
	points  []move   // last change of Report.Point, by rank
	ended   bool
}

type beat struct {
	seen  uint64
	state State
	at    time.Duration // the machine's clock at the last change
	named bool
}

type move struct {
	call  uint64
	phase Phase
	at    time.Duration
}

// New returns a machine that has observed nothing.
func New(c Config) *Machine {
	m := &Machine{c: c, beats: make([]beat, c.World), moves: make([][]move, c.World), points: make([]move, c.World)}
	slots := 0
	for _, g := range c.Groups {
		slots = max(slots, g.Slot+1)
	}
	for r := range m.moves {
		m.moves[r] = make([]move, slots)
	}
	return m
}

// Observe takes the reports of all ranks at time now, of any monotonic clock, and returns
// the new verdicts. After an End it returns nothing.
func (m *Machine) Observe(now time.Duration, reports []Report) []Verdict {
	if m.ended {
		return nil
	}
	if m.started {
		m.clock += max(0, min(now-m.last, 2*m.c.Interval))
	}
	m.started, m.last = true, now
	m.note(reports)
	for _, judge := range []func([]Report) *Verdict{m.dead, m.mismatch, m.done, m.silentTooLong, m.late, m.latePoint} {
		if v := judge(reports); v != nil {
			m.ended = true
			v.Kind, v.Text = End, v.Err.Error()
			return []Verdict{*v}
		}
	}
	return m.silent(reports)
}

// note remembers when each rank last changed.
func (m *Machine) note(reports []Report) {
	for r, rep := range reports {
		if b := &m.beats[r]; b.seen != rep.Beat || b.state != rep.State {
			b.seen, b.state, b.at = rep.Beat, rep.State, m.clock
		}
		for slot, p := range rep.In {
			if v := &m.moves[r][slot]; v.call != p.Call || v.phase != p.Phase {
				*v = move{p.Call, p.Phase, m.clock}
			}
		}
		if v := &m.points[r]; v.call != rep.Point.Call || v.phase != rep.Point.Phase {
			*v = move{rep.Point.Call, rep.Point.Phase, m.clock}
		}
	}
}

func (m *Machine) dead(reports []Report) *Verdict {
	for r, rep := range reports {
		if rep.State == Dead {
			return &Verdict{Ranks: []int{r}, Err: fmt.Errorf("%w: %s died%s", comm.ErrLost, m.name(r), during(rep))}
		}
	}
	return nil
}

func (m *Machine) mismatch(reports []Report) *Verdict {
	for _, g := range m.c.Groups {
		for i, a := range g.Ranks {
			p := reports[a].In[g.Slot]
			for _, b := range g.Ranks[i+1:] {
				q := reports[b].In[g.Slot]
				if p.Phase != Idle && q.Phase != Idle && p.Call == q.Call && p.Sig != q.Sig {
					return &Verdict{Ranks: []int{a, b}, Err: fmt.Errorf("%w in the %s group at call %d: rank %d runs %s, rank %d runs %s",
						comm.ErrMismatch, g.Name, p.Call, a, p.Op, b, q.Op)}
				}
			}
		}
	}
	return nil
}

// done finds a rank that has left while others wait for it.
func (m *Machine) done(reports []Report) *Verdict {
	for _, g := range m.c.Groups {
		lost, here, op := m.missing(g, reports)
		for _, r := range lost {
			if reports[r].State == Done {
				return &Verdict{Ranks: []int{r}, Err: fmt.Errorf("%w: %s has ended; %s waits in %s of the %s group",
					comm.ErrLost, m.name(r), names(here), op, g.Name)}
			}
		}
	}
	// Reports are not taken at the same moment. Of a Send and its Recv, the rank that
	// finishes first may have ended before the other notices, so wait before deciding.
	for r, rep := range reports {
		if rep.Point.Phase == Waiting && reports[rep.Peer].State == Done && m.clock-max(m.points[r].at, m.beats[rep.Peer].at) >= m.c.Silent {
			return &Verdict{Ranks: []int{rep.Peer}, Err: fmt.Errorf("%w: %s has ended; rank %d waits in %s", comm.ErrLost, m.name(rep.Peer), r, rep.Point.Op)}
		}
	}
	return nil
}

func (m *Machine) silentTooLong(reports []Report) *Verdict {
	for r, rep := range reports {
		if quiet := m.clock - m.beats[r].at; rep.State <= Alive && quiet >= m.c.Timeout {
			if rep.State == Absent {
				return &Verdict{Ranks: []int{r}, Err: fmt.Errorf("%w: %s has not joined the job within %v", comm.ErrTimeout, m.name(r), m.c.Timeout)}
			}
			return &Verdict{Ranks: []int{r}, Err: fmt.Errorf("%w: %s gave no sign of life for %v%s",
				comm.ErrTimeout, m.name(r), m.c.Timeout, during(rep))}
		}
	}
	return nil
}

// missing returns the members of a group that others wait for (lost), the waiting members
// (here) and the operation in which they wait.
func (m *Machine) missing(g Group, reports []Report) (lost, here []int, op string) {
	top := uint64(0)
	for _, r := range g.Ranks {
		if p := reports[r].In[g.Slot]; p.Phase != Idle {
			top = max(top, p.Call)
		}
	}
	if top == 0 {
		return nil, nil, ""
	}
	split := func(is func(Progress) bool) {
		lost, here = nil, nil
		for _, r := range g.Ranks {
			if is(reports[r].In[g.Slot]) {
				lost = append(lost, r)
			} else {
				here = append(here, r)
			}
		}
	}
	if split(func(p Progress) bool { return p.Call < top }); len(lost) == 0 {
		split(func(p Progress) bool { return p.Call == top && (p.Phase == Waiting || p.Phase == Moving) })
		leaving := false
		for _, r := range here {
			leaving = leaving || reports[r].In[g.Slot].Phase == Leaving
		}
		if !leaving {
			return nil, nil, ""
		}
	}
	for _, r := range here {
		if p := reports[r].In[g.Slot]; p.Phase != Idle && p.Op != "" {
			op = fmt.Sprintf("%s (call %d)", p.Op, p.Call)
			break
		}
	}
	return lost, here, op
}

// late finds ranks that others have waited for longer than the timeout.
func (m *Machine) late(reports []Report) *Verdict {
	for _, g := range m.c.Groups {
		lost, here, op := m.missing(g, reports)
		if len(lost) == 0 {
			continue
		}
		longest := time.Duration(0)
		for _, r := range here {
			if ph := reports[r].In[g.Slot].Phase; ph == Waiting || ph == Leaving {
				longest = max(longest, m.clock-m.moves[r][g.Slot].at)
			}
		}
		if longest < m.c.Timeout {
			continue
		}
		did := "did not arrive"
		if reports[lost[0]].In[g.Slot].Phase != Idle && reports[lost[0]].In[g.Slot].Call == reports[here[0]].In[g.Slot].Call {
			did = "did not finish"
		}
		var at []string
		for _, r := range lost {
			at = append(at, m.name(r)+during(reports[r]))
		}
		return &Verdict{Ranks: lost, Err: fmt.Errorf("%w: %s of the %s group: %s %s within %v; %s waited",
			comm.ErrTimeout, op, g.Name, strings.Join(at, ", "), did, m.c.Timeout, names(here))}
	}
	return nil
}

func (m *Machine) latePoint(reports []Report) *Verdict {
	for r, rep := range reports {
		if p := rep.Point.Phase; (p == Waiting || p == Leaving) && m.clock-m.points[r].at >= m.c.Timeout {
			return &Verdict{Ranks: []int{rep.Peer}, Err: fmt.Errorf("%w: %s: %s%s did not come within %v; rank %d waited",
				comm.ErrTimeout, rep.Point.Op, m.name(rep.Peer), during(reports[rep.Peer]), m.c.Timeout, r)}
		}
	}
	return nil
}

// silent reports ranks that have become silent, and silent ranks that are back, once each.
func (m *Machine) silent(reports []Report) (list []Verdict) {
	for r, rep := range reports {
		b := &m.beats[r]
		quiet := rep.State == Alive && m.clock-b.at >= m.c.Silent
		switch {
		case quiet && !b.named:
			b.named = true
			list = append(list, Verdict{Kind: Named, Ranks: []int{r}, Text: fmt.Sprintf("%s gives no sign of life%s; the job ends in %v unless it comes back",
				m.name(r), during(rep), (m.c.Timeout - (m.clock - b.at)).Round(100*time.Millisecond))})
		case b.named && !quiet:
			b.named = false
			list = append(list, Verdict{Kind: Back, Ranks: []int{r}, Text: m.name(r) + " is back"})
		}
	}
	return list
}

// Speaker returns the rank whose process prints warnings that all processes could print:
// the lowest rank that is alive and not silent; -1: none.
func (m *Machine) Speaker(reports []Report) int {
	for r, report := range reports {
		if report.State == Alive && !m.beats[r].named {
			return r
		}
	}
	return -1
}

func (m *Machine) name(r int) string {
	where := ""
	if m.c.Where != nil {
		where = m.c.Where(r)
	}
	if where == "" {
		return fmt.Sprintf("rank %d", r)
	}
	return fmt.Sprintf("rank %d (%s)", r, where)
}

// during describes the operation that a rank is running: " in all_gather …".
func during(rep Report) string {
	for _, p := range append([]Progress{rep.Point}, rep.In...) {
		if p.Phase != Idle && p.Op != "" {
			return " in " + p.Op
		}
	}
	return ""
}

func names(ranks []int) string {
	s := make([]string, len(ranks))
	for i, r := range ranks {
		s[i] = fmt.Sprint(r)
	}
	if len(s) == 1 {
		return "rank " + s[0]
	}
	return "ranks " + strings.Join(s, ", ")
}
