package run

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/receipt"
)

// hashed is a run of complete blocks (receipt.BlockElems) of a state's range that one rank hashes.
// Its bytes are at off of buf; values in 8 bits also have scales.
type hashed struct {
	tensor        int   // index into hashing.tensors
	first, blocks int64 // index of the first block in the tensor, and number of blocks
	elems         int64
	dtype         graph.DType
	buf, scales   graph.BufID
	off           int64 // bytes
	whole         bool  // the run is the complete range
}

// size returns the bytes of the run's hashes.
func (h *hashed) size() int64 {
	if h.whole {
		return receipt.Size
	}
	return h.blocks * receipt.Size
}

// hashing assigns the blocks of all states to the ranks that hash them.
type hashing struct {
	tensors []receipt.Tensor
	shares  [][]hashed // by rank of the world
}

// hashing divides the blocks of every state among the ranks that hold them. Each block is assigned
// to the holder with the fewest bytes so far. Tensors are in the byte order of their names. Each
// slice of a cut tensor counts as a tensor: its blocks are on one rank, for any number of ranks.
// The result depends only on the program and the world.
func (s *States) hashing() (*hashing, error) {
	h := &hashing{shares: make([][]hashed, s.world.Size)}
	bytes := make([]int64, s.world.Size)
	give := func(holders []int, x hashed) {
		to := holders[0]
		for _, r := range holders {
			if bytes[r] < bytes[to] {
				to = r
			}
		}
		h.shares[to] = append(h.shares[to], x)
		bytes[to] += x.elems * x.dtype.Size()
	}
	for _, i := range s.ByName() {
		for _, st := range s.Names(i) {
			t := receipt.Tensor{Name: s.p.Params[i].Name, State: Saved(st.Name), DType: graph.F32.String(), Elems: 1}
			if st.PerParam {
				buf, off, holders, err := s.perParam(i, st.Name)
				if err != nil {
					return nil, err
				}
				give(holders, hashed{tensor: len(h.tensors), blocks: 1, elems: 1, dtype: graph.F32, buf: buf, scales: graph.NoBuf, off: off, whole: true})
				h.tensors = append(h.tensors, t)
				continue
			}
			t.DType = s.p.Buf(st.Buf).DType.String()
			all := s.p.Slices(i)
			for k, slice := range all {
				one, n := t, len(h.tensors)
				if one.Elems = slice.Len; len(all) > 1 {
					one.Name = fmt.Sprintf("%s/slice.%d", t.Name, k)
				}
				err := s.extents(slice, st.Name, 0, func(e Extent) error {
					return s.blocks(e, &one, n, func(x hashed) { give(e.Holders, x) })
				})
				if err != nil {
					return nil, err
				}
				h.tensors = append(h.tensors, one)
			}
		}
	}
	return h, nil
}

// blocks calls give with runs of a tensor's blocks, cut at the ends of ranges.
func (s *States) blocks(e Extent, t *receipt.Tensor, n int, give func(hashed)) error {
	scales := graph.NoBuf
	if e.DType == graph.U8 {
		var err error
		if scales, err = s.scalesOf(e.Buf); err != nil {
			return err
		}
	}
	for lo := e.From; lo < e.To; {
		if lo%receipt.BlockElems != 0 {
			return fmt.Errorf("states: element %d of %s is not the first of a block", lo, t)
		}
		hi := min(e.To, (lo/receipt.RangeElems+1)*receipt.RangeElems)
		x := hashed{tensor: n, first: lo / receipt.BlockElems, elems: hi - lo, dtype: e.DType, buf: e.Buf, scales: scales, off: e.Off + (lo-e.From)*e.DType.Size()}
		x.blocks = (x.elems + receipt.BlockElems - 1) / receipt.BlockElems
		x.whole = x.first%receipt.RangeBlocks == 0 && (x.blocks == receipt.RangeBlocks || hi == t.Elems)
		give(x)
		lo = hi
	}
	return nil
}

// newHashing computes the hashing of the ranks' program.
func (rs *Ranks) newHashing() (*hashing, error) {
	return NewStates(rs.plan.Program, platform.OneProcess(rs.World.Size), nil).hashing()
}

// Tensors lists the states that Hash hashes, in its order.
func (rs *Ranks) Tensors() ([]receipt.Tensor, error) {
	h, err := rs.hashing()
	if err != nil {
		return nil, err
	}
	return h.tensors, nil
}

// Hash returns, for each of Tensors, the hashes of its ranges. Each rank hashes its blocks in its
// own process.
func (rs *Ranks) Hash() ([][]byte, error) {
	h, err := rs.hashing()
	if err != nil {
		return nil, err
	}
	parts := make([][]byte, rs.World.Size)
	err = rs.together(func(r *Rank) error {
		if e := r.elsewhere(); e != nil {
			m, err := e.call(request{Verb: verbHash})
			parts[r.Index] = m.Data
			return err
		}
		return r.on.Do(func() (err error) {
			parts[r.Index], err = r.hash(h.shares[r.Index], rs.here())
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("hash of the states: %w", err)
	}
	return h.assemble(parts)
}

// here returns the number of ranks that this process runs itself.
func (rs *Ranks) here() (n int) {
	for _, r := range rs.list {
		if r.elsewhere() == nil {
			n++
		}
	}
	return n
}

// assemble combines the ranks' hashes of blocks into hashes of ranges.
func (h *hashing) assemble(parts [][]byte) ([][]byte, error) {
	ranges := make([][]byte, len(h.tensors))
	blocks := map[[2]int64][]byte{} // ranges that several ranks hash, by tensor and range
	for i := range ranges {
		ranges[i] = make([]byte, h.tensors[i].Ranges()*receipt.Size)
	}
	for rank, share := range h.shares {
		data := parts[rank]
		for i := range share {
			x := &share[i]
			if int64(len(data)) < x.size() {
				return nil, fmt.Errorf("hash of the states: rank %d has sent too few bytes", rank)
			}
			n, t := x.first/receipt.RangeBlocks, &h.tensors[x.tensor]
			if x.whole {
				copy(ranges[x.tensor][n*receipt.Size:], data[:receipt.Size])
			} else {
				key := [2]int64{int64(x.tensor), n}
				if blocks[key] == nil {
					blocks[key] = make([]byte, min(receipt.RangeBlocks, t.Blocks()-n*receipt.RangeBlocks)*receipt.Size)
				}
				copy(blocks[key][x.first%receipt.RangeBlocks*receipt.Size:], data[:x.size()])
			}
			data = data[x.size():]
		}
	}
	for key, b := range blocks {
		sum := receipt.Range(b)
		copy(ranges[key[0]][key[1]*receipt.Size:], sum[:])
	}
	return ranges, nil
}

// hash returns the hashes of a rank's share, in sequence. Reading is done on the rank's goroutine,
// hashing on the rank's share of the process's processors.
func (r *Rank) hash(share []hashed, ranks int) ([]byte, error) {
	at := make([]int64, len(share)+1)
	for i := range share {
		at[i+1] = at[i] + share[i].size()
	}
	out := make([]byte, at[len(share)])
	type job struct {
		i            int
		data, scales []byte
	}
	workers := max(1, runtime.GOMAXPROCS(0)/max(ranks, 1))
	free, work := make(chan job, workers+1), make(chan job)
	var data, scales int64
	for i := range share {
		data, scales = max(data, share[i].elems*share[i].dtype.Size()), max(scales, share[i].blocks*graph.F32.Size())
	}
	for range workers + 1 {
		free <- job{data: make([]byte, data), scales: make([]byte, scales)}
	}
	var hashing sync.WaitGroup
	for range workers {
		hashing.Go(func() {
			defer crash.Guard()
			for j := range work {
				x := &share[j.i]
				data, scales := j.data[:x.elems*x.dtype.Size()], []byte(nil)
				if x.scales != graph.NoBuf {
					scales = j.scales
				}
				sums := receipt.AppendBlocks(out[at[j.i]:at[j.i]:at[j.i+1]], data, receipt.BlockElems*x.dtype.Size(), scales)
				if x.whole {
					sum := receipt.Range(sums)
					copy(out[at[j.i]:], sum[:])
				}
				free <- j
			}
		})
	}
	var err error
	for i := range share {
		x, j := &share[i], <-free
		j.i = i
		err = r.Exec.Read(x.buf, x.off, j.data[:x.elems*x.dtype.Size()])
		if err == nil && x.scales != graph.NoBuf {
			err = r.Exec.Read(x.scales, scaleOffset(x.off), j.scales[:x.blocks*graph.F32.Size()])
		}
		if err != nil {
			break
		}
		work <- j
	}
	close(work)
	hashing.Wait()
	return out, err
}
