package checkpoint

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

var background = context.Background()

// Files of the fixture's two ranks: rank 0 holds the parameters, rank 1 a moment.
const (
	modelFile  = "rank-00000-of-00002.safetensors"
	momentFile = "rank-00001-of-00002.safetensors"
)

// content returns a checkpoint of one tensor "w": rank 0 holds state "model", rank 1 state
// "exp_avg".
func content(model, moment []float32) ([]Tensor, []*Part) {
	tensors := []Tensor{{Name: "w", Shape: []int64{int64(len(model))}, States: []string{"model", "exp_avg"}}}
	return tensors, []*Part{part(0, 2, "model", model), part(1, 2, "exp_avg", moment)}
}

// part returns a rank's part of a state of "w", in two extents.
func part(index, of int, state string, v []float32) *Part {
	half := int64(len(v) / 2)
	p := &Part{Index: index, Of: of, Extents: []Extent{{state, "w", 0, half, safetensors.F32}, {state, "w", half, int64(len(v)) - half, safetensors.F32}}}
	p.Read = func(i int, off int64, dst []byte) error {
		from := p.Extents[i].Start + off/4
		for k := range len(dst) / 4 {
			binary.LittleEndian.PutUint32(dst[4*k:], math.Float32bits(v[from+int64(k)]))
		}
		return nil
	}
	return p
}

// save writes a checkpoint; its values contain the step.
func save(t *testing.T, s *Store, step int) string {
	t.Helper()
	tensors, parts := content([]float32{float32(step), 2, 3}, []float32{5, 6, float32(step)})
	folder, err := s.Save(background, Manifest{Step: step, Ranks: 2, Zero: 3, Run: json.RawMessage(`{"optimizer":"adamw"}`), Tensors: tensors},
		parts, []Blob{{"config.json", []byte("{}\n")}})
	require.NoError(t, err)
	return folder
}

func open(t *testing.T, dir string, o Options) *Store {
	t.Helper()
	s, err := Open(dir, o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// goOn opens dir as a resumed run does and returns the store and the chosen checkpoint.
func goOn(t *testing.T, dir string, o Options) (*Store, Choice) {
	t.Helper()
	s := open(t, dir, o)
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.True(t, c.Found())
	require.NoError(t, s.Continue(c))
	return s, c
}

// names lists the entries of a folder, without the lock and the marks of a store.
func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		if e.Name() != lockName && e.Name() != marksName {
			list = append(list, e.Name())
		}
	}
	return list
}

func readBack(t *testing.T, folder, name string, n int) []float32 {
	r, err := openState(folder, name)
	require.NoError(t, err)
	defer r.Close()
	v := make([]float32, n)
	require.NoError(t, r.ReadFloat32("w", 0, v))
	return v
}

func TestSaveListVerify(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "ckpt")
	list, err := List(dir)
	require.NoError(t, err)
	require.Empty(t, list)
	s := open(t, dir, Options{})
	for step := 1; step <= 3; step++ {
		save(t, s, step)
	}
	list, err = List(dir)
	require.NoError(t, err)
	require.Len(t, list, 3)
	m, err := Verify(background, list[2])
	require.NoError(t, err)
	require.Equal(t, 3, m.Step)
	require.Equal(t, s.Owner(), m.Owner)
	require.Len(t, m.Files, 3)
	require.Equal(t, []string{"model", "exp_avg"}, m.States())
	require.Equal(t, []float32{3, 2, 3}, readBack(t, list[2], "model", 3))
	require.NoError(t, s.Close())
	require.Equal(t, []string{"step-00000001", "step-00000002", "step-00000003"}, names(t, dir))
	require.NoFileExists(t, filepath.Join(dir, lockName))
}

func TestAFailedSaveLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	first := save(t, s, 7)
	boom := errors.New("boom")
	tensors, parts := content([]float32{3, 4}, []float32{3, 4})
	read := parts[1].Read
	parts[1].Read = func(i int, off int64, dst []byte) error {
		if i == 1 {
			return boom
		}
		return read(i, off, dst)
	}
	_, err := s.Save(background, Manifest{Step: 8, Tensors: tensors}, parts, nil)
	require.ErrorIs(t, err, boom)
	canceled, cancel := context.WithCancel(background)
	cancel()
	_, err = s.Save(canceled, Manifest{Step: 8, Tensors: tensors}, parts, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []string{"step-00000007"}, names(t, dir))
	require.Equal(t, []float32{7, 2, 3}, readBack(t, first, "model", 3))
}

func TestNonFiniteStatesAreNotSaved(t *testing.T) {
	inf, nan := float32(math.Inf(-1)), float32(math.NaN())
	dir := t.TempDir()
	s := open(t, dir, Options{})
	tensors, parts := content([]float32{1, 2, 3, 4}, []float32{1, inf, 3, nan})
	_, err := s.Save(background, Manifest{Step: 1, Tensors: tensors}, parts, nil)
	var odd *NonFinite
	require.ErrorAs(t, err, &odd)
	require.Equal(t, NonFinite{State: "exp_avg", Tensor: "w", Count: 2, Of: 4, First: 1}, *odd)
	require.ErrorContains(t, err, `exp_avg of "w": 2 of 4 values are not finite`)
	require.Empty(t, names(t, dir))
	tensors, parts = content([]float32{math.MaxFloat32, -math.MaxFloat32}, []float32{math.SmallestNonzeroFloat32, 0})
	_, err = s.Save(background, Manifest{Step: 1, Tensors: tensors}, parts, nil)
	require.NoError(t, err)
}

// TestWhatIsNotOursIsLeftAlone checks that a store neither removes, changes nor counts folders of
// other programs, even if their names resemble checkpoints.
func TestWhatIsNotOursIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	foreign := []string{"step-1", "step-2", "step-+5", "step--5", "step-0000001", "step-00000003", "step-00000004.1", "step-00000004.02", ".writing-thesis",
		".writing-step-00000009", ".removing-x", ".writing-step-00000001-0123456789abcdef0123456789abcdef", "notes"}
	for _, name := range foreign {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "mine"), []byte(name), 0o644))
	}
	list, err := List(dir)
	require.NoError(t, err)
	require.Empty(t, list)
	s := open(t, dir, Options{Keep: 1})
	for step := 1; step <= 5; step++ {
		save(t, s, step)
		require.NoError(t, s.Confirm())
	}
	require.NoError(t, s.Close())
	for _, name := range foreign {
		text, err := os.ReadFile(filepath.Join(dir, name, "mine"))
		require.NoError(t, err)
		require.Equal(t, name, string(text))
	}
	list, err = List(dir)
	require.NoError(t, err)
	require.Equal(t, []string{filepath.Join(dir, "step-00000005")}, list)
	require.Len(t, names(t, dir), len(foreign)+1)
}

// TestATakenNameIsNotWrittenOver checks that a save uses the next free name if a damaged folder has
// the step's name.
func TestATakenNameIsNotWrittenOver(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"step-00000003", "step-00000003.2"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	s := open(t, dir, Options{})
	require.Equal(t, filepath.Join(dir, "step-00000003.3"), save(t, s, 3))
	require.Equal(t, filepath.Join(dir, "step-00000003.4"), save(t, s, 3))
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.Equal(t, "step-00000003.4", c.Name)
	_, err = Verify(background, filepath.Join(dir, "step-00000003"))
	require.ErrorIs(t, err, ErrDamaged)
	require.ErrorContains(t, err, "manifest.json is missing")
}

// TestKeep checks that Keep counts the confirmed checkpoints of this run. Newer, unconfirmed
// checkpoints are kept in addition.
func TestKeep(t *testing.T) {
	for keep, want := range map[int][]int{0: {1, 2, 3, 4, 5, 6}, 1: {5, 6}, 2: {4, 5, 6}, 9: {1, 2, 3, 4, 5, 6}} {
		dir := t.TempDir()
		s := open(t, dir, Options{Keep: keep})
		require.NoError(t, s.Confirm(), "nothing to confirm")
		for step := 1; step <= 6; step++ {
			save(t, s, step)
			if step < 6 {
				require.NoError(t, s.Confirm())
				require.NoError(t, s.Confirm(), "twice is once")
			}
		}
		var list []string
		for _, step := range want {
			list = append(list, Name(step, 1))
		}
		require.Equal(t, list, names(t, dir), "keep %d", keep)
	}
}

// TestUnconfirmedDoNotCount checks that unconfirmed checkpoints do not cause the removal of a
// confirmed one.
func TestUnconfirmedDoNotCount(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{Keep: 1})
	save(t, s, 1)
	require.NoError(t, s.Confirm())
	save(t, s, 2)
	save(t, s, 3)
	require.Equal(t, []string{"step-00000001", "step-00000002", "step-00000003"}, names(t, dir))
	require.NoError(t, s.Confirm())
	require.Equal(t, []string{"step-00000003"}, names(t, dir))
}

// TestKeepAfterGoingBack resumes from step 20 because step 30 is damaged. The run must remove its
// older checkpoints and keep the new ones.
func TestKeepAfterGoingBack(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	for step := 10; step <= 30; step += 10 {
		save(t, s, step)
		require.NoError(t, s.Confirm())
	}
	require.NoError(t, s.Close())
	flip(t, filepath.Join(dir, "step-00000030", modelFile), -1)
	s, c := goOn(t, dir, Options{Keep: 1})
	require.Equal(t, 20, c.Step)
	require.Len(t, c.Passed, 1)
	require.Contains(t, c.Passed[0].String(), "step-00000030 is passed over: "+filepath.Join(dir, "step-00000030", modelFile)+" has CRC-32C")
	save(t, s, 25)
	require.NoError(t, s.Confirm())
	require.Equal(t, []string{"step-00000025", "step-00000030"}, names(t, dir))
	require.NoError(t, s.Close())
	s, c = goOn(t, dir, Options{Keep: 1})
	require.Equal(t, 25, c.Step)
	require.Equal(t, filepath.Join(dir, "step-00000030.2"), save(t, s, 30))
	require.NoError(t, s.Confirm())
	require.Equal(t, []string{"step-00000030.2"}, names(t, dir))
}

func TestAnotherRunsCheckpointsAreKept(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	save(t, s, 1)
	require.NoError(t, s.Close())
	require.NoError(t, os.CopyFS(filepath.Join(dir, "step-00000007"), os.DirFS("testdata/v1/step-00000007")))
	s, c := goOn(t, dir, Options{Keep: 1}) // version 1 has no owner
	require.Equal(t, 7, c.Step)
	for step := 8; step < 12; step++ {
		save(t, s, step)
		require.NoError(t, s.Confirm())
	}
	require.Equal(t, []string{"step-00000001", "step-00000007", "step-00000011"}, names(t, dir))
}

// TestReplace checks that Replace removes the checkpoints of earlier runs with the same mark and
// nothing else.
func TestReplace(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir, Options{Mark: "demo"})
	save(t, a, 4)
	require.NoError(t, a.Close())
	b := open(t, dir, Options{})
	save(t, b, 3)
	require.NoError(t, b.Replace())
	require.NoError(t, b.Close())
	c := open(t, dir, Options{Mark: "demo"})
	save(t, c, 2)
	require.NoError(t, c.Replace())
	require.Equal(t, []string{"step-00000002", "step-00000003"}, names(t, dir))
}

// TestWhatIsReplacedComesLast simulates a run killed before it removed the checkpoints that it
// replaces. Choose must prefer its checkpoints, whatever the step of the older run. It uses the
// older run's only if all of the new ones are damaged.
func TestWhatIsReplacedComesLast(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir, Options{Mark: "demo"})
	save(t, a, 4)
	require.NoError(t, a.Close())
	b := open(t, dir, Options{Mark: "demo"})
	save(t, b, 1)
	save(t, b, 2)
	require.NoError(t, b.Close())
	c, err := Choose(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, 2, c.Step)
	require.Empty(t, c.Passed)
	for _, step := range []int{1, 2} {
		require.NoError(t, os.Truncate(filepath.Join(dir, Name(step, 1), "config.json"), 1))
	}
	c, err = Choose(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Equal(t, 4, c.Step)
	require.Len(t, c.Passed, 2)
}

func TestOneProcessAtATime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ck")
	require.NoError(t, heldAt(dir))
	s := open(t, dir, Options{})
	var busy *Busy
	_, err := Open(dir, Options{})
	require.ErrorAs(t, err, &busy)
	require.ErrorContains(t, err, fmt.Sprintf("process %d on ", os.Getpid()))
	require.ErrorAs(t, heldAt(dir), &busy)
	save(t, s, 1)
	require.NoError(t, s.Close())
	require.NoError(t, heldAt(dir))
	require.NoError(t, open(t, dir, Options{}).Close())

	require.NoError(t, os.WriteFile(filepath.Join(dir, lockName), []byte("process 1 on \x1b[31mx\n"), 0o644)) // a killed process left this lock
	s = open(t, dir, Options{})
	require.NoError(t, os.WriteFile(filepath.Join(dir, lockName), []byte("process 1 on \x1b[31mx\n"), 0o644))
	require.ErrorContains(t, heldAt(dir), "process 1 on ?[31mx")
	require.NoError(t, s.Close())
}

func TestAnUnusedFolderIsLeftAsItWas(t *testing.T) {
	top := t.TempDir()
	require.NoError(t, open(t, filepath.Join(top, "a", "b"), Options{}).Close())
	require.Empty(t, names(t, top))
	require.NoError(t, open(t, top, Options{}).Close())
	require.DirExists(t, top)
}

// TestTheFolderIsRemoved checks that a store creates and locks its folder again after somebody
// removed it.
func TestTheFolderIsRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ck")
	s := open(t, dir, Options{})
	save(t, s, 1)
	require.NoError(t, os.RemoveAll(dir))
	save(t, s, 2)
	require.Error(t, heldAt(dir), "and locked again")
	require.NoError(t, s.Confirm())
	require.NoError(t, s.Close())
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.Equal(t, 2, c.Step)
	require.True(t, c.Marks.Confirmed(c.Manifest))
}

// TestRemainsOfAKill checks that opening a store removes the remains of a killed save and a killed
// removal. It removes only folders that the marks list.
func TestRemainsOfAKill(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	save(t, s, 1)
	for _, stem := range []string{tempPrefix + "step-00000002", gonePrefix + "step-00000000"} {
		temp, err := s.working(stem)
		require.NoError(t, err)
		temp = filepath.Join(dir, temp)
		require.NoError(t, os.Mkdir(temp, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(temp, modelFile), []byte("half"), 0o644))
	}
	other := filepath.Join(dir, ".writing-step-00000002-00000000000000000000000000000000")
	require.NoError(t, os.Mkdir(other, 0o755))
	list, err := List(dir)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Len(t, names(t, dir), 4, "listing changes nothing")
	require.NoError(t, s.Close())
	open(t, dir, Options{})
	require.Equal(t, []string{filepath.Base(other), "step-00000001"}, names(t, dir))
}

// TestMarksRemoveNothingElse checks that a folder listed in the marks is removed only if its name
// has the store's form.
func TestMarksRemoveNothingElse(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "mine"), 0o755))
	var text []byte
	for _, name := range []string{"mine", "../" + filepath.Base(dir), ".writing-x", ".writing-../mine-0123456789abcdef0123456789abcdef", "step-00000001"} {
		line, err := mark{Event: markWorking, Name: name}.line()
		require.NoError(t, err)
		text = append(text, line...)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, marksName), text, 0o644))
	s := open(t, dir, Options{})
	require.NoError(t, s.Damaged())
	require.DirExists(t, filepath.Join(dir, "mine"))
}

func TestDivergence(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	save(t, s, 10)
	require.NoError(t, s.Confirm())
	save(t, s, 20)
	require.NoError(t, s.MarkDivergence(21, map[string]string{"lr": "1e30"}))
	require.NoError(t, s.Close())

	s, c := goOn(t, dir, Options{Keep: 1})
	require.Equal(t, 10, c.Step)
	require.Equal(t, "step-00000020 is passed over: "+errDiverged.Error(), c.Passed[0].String())
	require.Equal(t, []Divergence{{Step: 21, From: "step-00000020", Settings: map[string]string{"lr": "1e30"}}}, s.Diverged())
	require.NoError(t, s.MarkDivergence(15, nil)) // the newest checkpoint, of step 10, is confirmed and stays usable
	require.Equal(t, filepath.Join(dir, "step-00000020.2"), save(t, s, 20))
	require.NoError(t, s.Confirm())
	require.Equal(t, []string{"step-00000020.2"}, names(t, dir))
	require.NoError(t, s.MarkDivergence(22, nil))
	require.NoError(t, s.Close())
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.Equal(t, "step-00000020.2", c.Name, "a confirmed one is not passed over")
	require.Len(t, c.Marks.Divergences, 3)
}

// TestDivergedFromAll checks the case where the run diverged from every intact checkpoint: Choose
// returns the newest. A confirmed update after it removes the mark.
func TestDivergedFromAll(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	save(t, s, 10)
	require.NoError(t, s.MarkDivergence(11, nil))
	save(t, s, 20)
	require.NoError(t, s.MarkDivergence(21, nil))
	save(t, s, 30)
	require.NoError(t, s.Close())
	flip(t, filepath.Join(dir, "step-00000030", "config.json"), 0)
	s, c := goOn(t, dir, Options{})
	require.Equal(t, 20, c.Step)
	require.Len(t, c.Passed, 1)
	require.NoError(t, s.Confirm())
	require.NoError(t, s.Close())
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.Equal(t, 20, c.Step)
	require.False(t, c.Marks.Diverged(c.Manifest))
}

// TestDamagedMarks checks two kinds of damage. A line cut short, as by a kill, is ignored; a
// flipped byte is reported as damage.
func TestDamagedMarks(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	save(t, s, 1)
	require.NoError(t, s.Confirm())
	save(t, s, 2)
	require.NoError(t, s.MarkDivergence(3, nil))
	require.NoError(t, s.Close())
	path := filepath.Join(dir, marksName)
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	for n := range whole {
		m := parseMarks(path, bytes.NewReader(whole[:n]))
		require.NoError(t, m.Damaged)
		require.Equal(t, strings.LastIndexByte(string(whole[:n]), '\n')+1, int(m.whole))
	}
	for i := range whole {
		bad := append([]byte(nil), whole...)
		bad[i] ^= 4
		m := parseMarks(path, bytes.NewReader(bad))
		if i < len(whole)-1 { // without its last byte the line counts as cut short
			require.ErrorIs(t, m.Damaged, ErrDamaged, "byte %d", i)
		}
	}
	require.NoError(t, os.WriteFile(path, whole[:len(whole)-5], 0o644))
	s, c := goOn(t, dir, Options{})
	require.Equal(t, 2, c.Step)
	require.NoError(t, s.Confirm())
	require.NoError(t, s.Close())
	m, err := marksOf(dir)
	require.NoError(t, err)
	require.NoError(t, m.Damaged, "what was cut is cut off before the next line")
	require.Len(t, m.confirmed, 2)
}

func TestLongMarksAreShortened(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{Keep: 1})
	save(t, s, 1)
	require.NoError(t, s.Confirm())
	save(t, s, 2)
	require.NoError(t, s.MarkDivergence(3, map[string]string{"lr": "1"}))
	for s.marks.whole < longMarks {
		require.NoError(t, s.append(mark{Event: markConfirmed, Key: strings.Repeat("x", 1000)}))
	}
	require.NoError(t, s.Close())
	s = open(t, dir, Options{})
	require.Less(t, s.marks.whole, int64(2000))
	require.Equal(t, []string{"step-00000001", "step-00000002"}, names(t, dir))
	c, err := Choose(background, dir, nil)
	require.NoError(t, err)
	require.Equal(t, 1, c.Step)
	require.True(t, c.Marks.Confirmed(c.Manifest))
	require.Equal(t, []Divergence{{Step: 3, Settings: map[string]string{"lr": "1"}, From: "step-00000002"}}, s.Diverged())
	save(t, s, 3)
	require.NoError(t, s.Confirm())
}

// TestLook checks that Look finds one non-finite value at any index of slices of any length up to
// 20, and reports no finite value.
func TestLook(t *testing.T) {
	odd32 := []uint32{0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff}
	even32 := []uint32{0, 0x80000000, 0x7f7fffff, 0xff7fffff, 0x807fffff, 1, 0x3f800000}
	for n := range 21 {
		for at := range n {
			for i, bits := range append(odd32, even32...) {
				v := make([]float32, n)
				for i := range v {
					v[i] = float32(i) - 3
				}
				v[at] = math.Float32frombits(bits)
				var e NonFinite
				if e.Look(100, v); i < len(odd32) {
					require.Equal(t, NonFinite{Count: 1, First: 100 + int64(at)}, e)
				} else {
					require.Zero(t, e)
				}
			}
		}
	}
}

// TestLookAtHalves checks all 65536 bit patterns of BF16 and F16: exactly the non-finite ones are
// counted.
func TestLookAtHalves(t *testing.T) {
	for dtype, exponent := range map[safetensors.DType]int{safetensors.BF16: 0x7f80, safetensors.F16: 0x7c00} {
		for bits := range 1 << 16 {
			v := make([]byte, 2*23)
			at := bits % 23
			v[2*at], v[2*at+1] = byte(bits), byte(bits>>8)
			var e NonFinite
			e.lookAt(&Extent{Start: 100, N: 23, DType: dtype}, 0, v)
			want := NonFinite{Of: 23}
			if bits&exponent == exponent {
				want.Count, want.First = 1, 100+int64(at)
			}
			if e != want {
				require.Equal(t, want, e, "%s %04x", dtype, bits)
			}
		}
	}
}

// TestTheNextRunRemovesWhatWasToGo simulates a run killed after an update and before it removed
// older checkpoints. The next run's first update must remove them, even if it resumes from the same
// checkpoint.
func TestTheNextRunRemovesWhatWasToGo(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{}) // removes nothing, like a run killed too early
	for step := range 4 {
		save(t, s, step+1)
		require.NoError(t, s.Confirm())
	}
	require.NoError(t, s.Close())
	s, c := goOn(t, dir, Options{Keep: 2})
	require.Equal(t, 4, c.Manifest.Step)
	require.Len(t, names(t, dir), 4, "nothing goes before an update")
	require.NoError(t, s.Confirm())
	require.Equal(t, []string{Name(3, 1), Name(4, 1)}, names(t, dir))
	require.NoError(t, s.Close())
}

func heldAt(dir string) error {
	d, err := OpenDir(filesys.System, dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Held(), d.Close())
}
