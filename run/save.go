package run

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/platform"
)

// piece is an extent of a checkpoint, and its place in the buffers of its rank.
type piece struct {
	checkpoint.Extent
	buf graph.BufID
	off int64 // bytes
}

var dtypes = map[graph.DType]safetensors.DType{graph.F32: safetensors.F32, graph.BF16: safetensors.BF16, graph.F16: safetensors.F16, graph.U8: "U8"}

// shares divides every state of every parameter among the ranks that hold it, for saving. Each
// extent is assigned to the holder with the fewest bytes so far, so each element is saved once. The
// result depends only on the program and the world. States with wider elements come first, and
// parameters are in the program's order.
func (s *States) shares() ([][]piece, error) {
	shares, bytes := make([][]piece, s.world.Size), make([]int64, s.world.Size)
	give := func(holders []int, list ...piece) {
		to := holders[0]
		for _, r := range holders {
			if bytes[r] < bytes[to] {
				to = r
			}
		}
		for _, p := range list {
			shares[to] = append(shares[to], p)
			bytes[to] += p.Bytes()
		}
	}
	for i := range s.p.Tensors() {
		for _, st := range s.Names(i) {
			at := checkpoint.Extent{State: Saved(st.Name), Tensor: s.p.Params[i].Name}
			if st.PerParam {
				buf, off, holders, err := s.perParam(i, st.Name)
				if err != nil {
					return nil, err
				}
				at.N, at.DType = 1, safetensors.F32
				give(holders, piece{at, buf, off})
				continue
			}
			err := s.Extents(i, st.Name, 0, s.p.Params[i].Elems(), func(e Extent) error {
				return s.cut(e, at, func(list ...piece) { give(e.Holders, list...) })
			})
			if err != nil {
				return nil, err
			}
		}
	}
	for _, share := range shares {
		slices.SortStableFunc(share, func(a, b piece) int { return int(b.DType.Size() - a.DType.Size()) })
	}
	return shares, nil
}

// cut calls give with a run of elements in extents of at most checkpoint.ExtentBytes; elements of
// 8 bits come with their scales.
func (s *States) cut(e Extent, at checkpoint.Extent, give func(...piece)) error {
	dtype, ok := dtypes[e.DType]
	if !ok {
		return fmt.Errorf("states: %s of %q is of %s, which a checkpoint cannot hold", at.State, at.Tensor, e.DType)
	}
	most := checkpoint.ExtentBytes / dtype.Size()
	for lo := e.From; lo < e.To; lo += most {
		p := piece{at, e.Buf, e.Off + (lo-e.From)*dtype.Size()}
		p.Start, p.N, p.DType = lo, min(most, e.To-lo), dtype
		if e.DType != graph.U8 {
			give(p)
			continue
		}
		if lo%graph.QuantBlock != 0 {
			return fmt.Errorf("states: element %d of %s of %q is not the first of a block", lo, at.State, at.Tensor)
		}
		scales, err := s.scalesOf(e.Buf)
		if err != nil {
			return err
		}
		scale := piece{at, scales, scaleOffset(p.off)}
		scale.State += checkpoint.ScaleSuffix
		scale.Start, scale.N, scale.DType = lo/graph.QuantBlock, (p.N+graph.QuantBlock-1)/graph.QuantBlock, safetensors.F32
		give(p, scale)
	}
	return nil
}

// Tensors describes every parameter and its states, for a checkpoint's manifest.
func (s *States) Tensors() []checkpoint.Tensor {
	list := make([]checkpoint.Tensor, len(s.p.Tensors()))
	for i := range list {
		list[i] = checkpoint.Tensor{Name: s.p.Params[i].Name, Shape: s.p.Params[i].Shape}
		for _, st := range s.Names(i) {
			list[i].States = append(list[i].States, Saved(st.Name))
			if st.PerParam {
				list[i].Scalars = append(list[i].Scalars, Saved(st.Name))
			}
		}
	}
	return list
}

// PartBytes returns the bytes of states that the ranks of a program's world save: the maximum over
// ranks, and the sum.
func PartBytes(p *graph.Program, ranks int) (most, all int64, err error) {
	parts, err := Parts(p, ranks)
	for _, part := range parts {
		most, all = max(most, part.Bytes()), all+part.Bytes()
	}
	return most, all, err
}

// Parts returns each rank's part of a checkpoint, without the functions that read it.
func Parts(p *graph.Program, ranks int) ([]*checkpoint.Part, error) {
	shares, err := NewStates(p, platform.OneProcess(ranks), nil).shares()
	parts := make([]*checkpoint.Part, len(shares))
	for i, share := range shares {
		parts[i] = &checkpoint.Part{Index: i, Of: len(shares)}
		for _, piece := range share {
			parts[i].Extents = append(parts[i].Extents, piece.Extent)
		}
	}
	return parts, err
}

// part returns a rank's part of a checkpoint. Its Read must be called on the rank's goroutine.
func (rs *Ranks) part(r *Rank) (*checkpoint.Part, error) {
	rs.sharing.Do(func() {
		rs.shares, rs.unshared = NewStates(rs.plan.Program, platform.OneProcess(rs.World.Size), nil).shares()
	})
	if rs.unshared != nil {
		return nil, rs.unshared
	}
	share := rs.shares[r.Index]
	p := &checkpoint.Part{Index: r.Index, Of: len(rs.shares), Buffer: rs.plan.Config.SaveBuffer, Extents: make([]checkpoint.Extent, len(share))}
	for i := range share {
		p.Extents[i] = share[i].Extent
	}
	p.Read = func(i int, off int64, dst []byte) error { return r.Exec.Read(share[i].buf, share[i].off+off, dst) }
	return p, nil
}

// elsewhere returns the rank's remote, nil if the rank runs in this process.
func (r *Rank) elsewhere() *remote {
	e, _ := r.Exec.(*remote)
	return e
}

// together runs f for all ranks at once, and returns the error of the first rank that failed.
// Unlike Each it ends no rank, because an error here leaves the states unchanged.
func (rs *Ranks) together(f func(r *Rank) error) error {
	errs := make([]error, len(rs.list))
	var done sync.WaitGroup
	for i, r := range rs.list {
		done.Go(func() {
			defer crash.Guard()
			errs[i] = f(r)
		})
	}
	done.Wait()
	return cmp.Or(errs...)
}

// Save writes every rank's part of a checkpoint, each in the rank's process, and returns the files.
// If values are not finite, the error is a *checkpoint.NonFinite.
func (rs *Ranks) Save(ctx context.Context, to *checkpoint.Pending) ([]checkpoint.File, error) {
	files := make([]checkpoint.File, len(rs.list))
	parts, err := rs.parts()
	if err != nil {
		return nil, err
	}
	err = rs.together(func(r *Rank) (err error) {
		if e := r.elsewhere(); e != nil {
			files[r.Slot], err = e.file(request{Verb: verbSave, Name: to.Name()})
			return err
		}
		return r.on.Do(func() (err error) {
			files[r.Slot], err = checkpoint.WritePart(ctx, to.Folder(), parts[r.Slot])
			return err
		})
	})
	return files, err
}

// parts returns the parts of a checkpoint that the ranks of this process save, by slot.
func (rs *Ranks) parts() ([]*checkpoint.Part, error) {
	list := make([]*checkpoint.Part, len(rs.list))
	for i, r := range rs.list {
		var err error
		if list[i], err = rs.part(r); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// Stage copies every rank's states within its process's memory. WriteStaged saves the copy while
// training changes the states.
func (rs *Ranks) Stage() error {
	parts, err := rs.parts()
	if err != nil {
		return err
	}
	return rs.together(func(r *Rank) error {
		if e := r.elsewhere(); e != nil {
			_, err := e.call(request{Verb: verbStage})
			return err
		}
		return r.on.Do(func() error { return r.image.Stage(parts[r.Slot]) })
	})
}

// WriteStaged saves the states that Stage copied last. It may run concurrently with all other
// methods except Stage and Close.
func (rs *Ranks) WriteStaged(ctx context.Context, to *checkpoint.Pending) ([]checkpoint.File, error) {
	files := make([]checkpoint.File, len(rs.list))
	err := rs.together(func(r *Rank) (err error) {
		if e := r.elsewhere(); e != nil {
			files[r.Slot], err = e.file(request{Verb: verbWriteStaged, Name: to.Name()})
		} else {
			files[r.Slot], err = r.image.Write(ctx, to.Folder())
		}
		return err
	})
	return files, err
}

// file sends a request that is answered by a file of a checkpoint.
func (r *remote) file(q request) (checkpoint.File, error) {
	m, err := r.call(q)
	if err == nil && m.File == nil {
		err = fmt.Errorf("rank %d did not name the file that it saved", r.rank)
	}
	if err != nil {
		return checkpoint.File{}, err
	}
	return *m.File, nil
}

// processes returns the first rank of every other process.
func (rs *Ranks) processes() (list []*remote) {
	seen := map[*channel]bool{}
	for _, r := range rs.list {
		if e := r.elsewhere(); e != nil && !seen[e.channel] {
			seen[e.channel] = true
			list = append(list, e)
		}
	}
	return list
}

// Join makes every other process open the store's checkpoint folder by its absolute path, which
// requires a folder that all hosts share. token lets each process check that it is the same folder.
func (rs *Ranks) Join(path, token string) error {
	for _, e := range rs.processes() {
		if _, err := e.call(request{Verb: verbJoin, Name: path, Data: []byte(token)}); err != nil {
			return err
		}
	}
	return nil
}

// NotJoined is the error of a process that cannot take part because it did not find the leader's
// checkpoint folder.
type NotJoined struct{ error }

func (e *NotJoined) Unwrap() error { return e.error }

// join opens the leader's checkpoint folder, into which this process's ranks save.
func (rs *Ranks) join(path, token string) error {
	folders := rs.folders
	if folders == nil {
		folders = filesys.System
	}
	j, err := checkpoint.Join(folders, cmp.Or(rs.folder, path), token)
	if err != nil {
		host, _ := os.Hostname()
		return &NotJoined{fmt.Errorf("rank %d (host %s) does not have it, and every rank writes its own file: give a folder that all hosts share (%w)", rs.World.Local[0], host, err)}
	}
	if was := rs.joined.Swap(j); was != nil {
		return was.Close()
	}
	return nil
}

// errNotJoined is the error of a save or load before the leader has named the checkpoint folder.
var errNotJoined = errors.New("the leader has named no checkpoint folder")

// within calls do with the folder of a checkpoint that the leader has begun.
func (rs *Ranks) within(name string, do func(filesys.Folder) error) error {
	j := rs.joined.Load()
	if j == nil {
		return errNotJoined
	}
	f, err := j.Writing(name)
	if err != nil {
		return err
	}
	return errors.Join(do(f), f.Close())
}

// Load sets the ranks' states from a checkpoint; each process reads the states of its ranks. States
// that the checkpoint lacks do not change. Errors wrap checkpoint.ErrDamaged if the files are
// damaged.
func (rs *Ranks) Load(ctx context.Context, from *checkpoint.Checkpoint) error {
	others := rs.processes()
	errs := make([]error, len(others)+1)
	var done sync.WaitGroup
	for i, e := range others {
		done.Go(func() {
			defer crash.Guard()
			_, errs[i+1] = e.call(request{Verb: verbLoad, Name: from.Name})
		})
	}
	errs[0] = rs.load(ctx, from)
	done.Wait()
	for _, err := range errs {
		if err != nil && !errors.Is(err, checkpoint.ErrDamaged) {
			return err // the cause may be other than damaged files
		}
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// loadNamed does the same as load for a checkpoint in the leader's folder, by name.
func (rs *Ranks) loadNamed(ctx context.Context, name string) error {
	j := rs.joined.Load()
	if j == nil {
		return errNotJoined
	}
	c, err := j.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(rs.load(ctx, c), c.Close())
}

// load does the same as Load for the ranks that this process runs itself.
func (rs *Ranks) load(ctx context.Context, from *checkpoint.Checkpoint) error {
	local := map[int]Holder{}
	for _, r := range rs.list {
		if r.elsewhere() == nil {
			local[r.Index] = r
		}
	}
	held, err := from.Contents()
	if err != nil {
		return err
	}
	s := NewStates(rs.plan.Program, platform.OneProcess(rs.World.Size), local)
	params := map[string]int{}
	for i := range s.p.Tensors() {
		params[s.p.Params[i].Name] = i
	}
	wants, scalars, err := s.wants(held)
	if err != nil {
		return err
	}
	return from.Load(ctx, wants, checkpoint.Loading{
		Sink: func(state, tensor string, start int64, v []float32) error {
			if scalars[state] {
				return s.WriteScalar(params[tensor], loaded(state), v[0])
			}
			return s.Write(params[tensor], loaded(state), start, v)
		},
		Dequantize: func(state string, dst []float32, codes []byte, scale float32) error {
			m, err := mapOf(loaded(state))
			if err == nil {
				m.Dequantize(dst, codes, scale)
			}
			return err
		},
	})
}

// wants lists the extents of a checkpoint's states that the local ranks hold. It also returns the
// states with one number a parameter.
func (s *States) wants(held map[string]checkpoint.Tensor) (list []checkpoint.Want, scalars map[string]bool, err error) {
	scalars = map[string]bool{}
	for i := range s.p.Tensors() {
		name := s.p.Params[i].Name
		for _, st := range s.Names(i) {
			w := checkpoint.Want{State: Saved(st.Name), Tensor: name, N: 1}
			if !slices.Contains(held[name].States, w.State) {
				continue
			}
			if st.PerParam {
				scalars[w.State] = true
				list = append(list, w)
				continue
			}
			n := s.p.Params[i].Elems()
			want := func(e Extent) error {
				if slices.ContainsFunc(e.Holders, func(r int) bool { return s.local[r] != nil }) {
					w.Start, w.N = e.From, e.To-e.From
					list = append(list, w)
				}
				return nil
			}
			if err := cmp.Or(s.Extents(i, st.Name, 0, n, want), s.copies(i, st.Name, 0, n, want)); err != nil {
				return nil, nil, err
			}
		}
	}
	return list, scalars, nil
}
