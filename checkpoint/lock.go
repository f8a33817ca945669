package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Busy is the refusal of a folder that another process writes to.
type Busy struct {
	Dir    string
	Holder string // what the lock says of it: process, host, since when
}

func (e *Busy) Error() string {
	return fmt.Sprintf("another run has %s open (%s); wait for it, or give another folder", e.Dir, e.Holder)
}

// Foreign is the refusal of a folder whose marks or lock another user made: what they say
// would have this process remove files.
type Foreign struct {
	Path        string
	Owner, Ours int64 // users' numbers
}

func (e *Foreign) Error() string {
	dir := filepath.Dir(e.Path)
	return fmt.Sprintf("%s belongs to user %d, and files that this process makes there belong to user %d: it removes nothing by what another user wrote; to go on from these checkpoints in a folder of your own, copy the newest (cp -r %s FOLDER/) and resume in FOLDER", e.Path, e.Owner, e.Ours, filepath.Join(dir, "step-N"))
}

// own refuses a file of the store's own that another user made, or that has another name
// elsewhere.
func (s *Store) own(name string, st filesys.Info) error {
	path := filepath.Join(s.f.Path(), name)
	switch {
	case !st.Mode.IsRegular():
		return fmt.Errorf("%s is not a regular file", path)
	case st.Owner != s.user:
		return &Foreign{path, st.Owner, s.user}
	case st.Links > 1:
		return fmt.Errorf("%s has another name elsewhere (a hard link); remove it, or give another folder", path)
	}
	return nil
}

// takeLock takes the folder's lock for this process until release: the kernel gives it
// back when the process ends, however it ends.
func (s *Store) takeLock() (filesys.File, error) {
	for {
		f, err := s.f.OpenFile(lockName, os.O_RDWR|os.O_CREATE|filesys.NoWait, 0o666)
		if errors.Is(err, os.ErrPermission) {
			if st, serr := s.f.Lstat(lockName); serr == nil {
				err = cmp.Or(s.own(lockName, st), err)
			}
		}
		if err != nil {
			return nil, err
		}
		ours, err := s.claim(f)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if ours {
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
}

// claim locks f and sees that it still has its name: the holder before removes it
// while it has the lock.
func (s *Store) claim(f filesys.File) (ours bool, err error) {
	st, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !st.Mode.IsRegular() {
		return false, s.own(lockName, st)
	}
	got, err := tryLock(f)
	if err != nil {
		return false, err
	}
	if !got {
		return false, &Busy{s.f.Path(), holder(f)}
	}
	now, err := s.f.Lstat(lockName)
	if errors.Is(err, os.ErrNotExist) || err == nil && !filesys.Same(st, now) {
		return false, nil
	}
	if err == nil {
		err = s.own(lockName, st)
	}
	if err != nil {
		return false, err
	}
	host, _ := os.Hostname() // "" where it has no name
	text := fmt.Sprintf("process %d on %s since %s\n%s\n", os.Getpid(), host, time.Now().UTC().Format(time.RFC3339), s.token)
	return true, errors.Join(f.Truncate(0), writeAt(f, text))
}

// Token is what the lock of this store says beside its holder: other processes of a run
// know by it that they have opened the same folder.
func (s *Store) Token() string { return s.token }

// Join opens the folder of a store that another process of the run has open, by its path
// there and its Token.
func Join(o filesys.Opener, path, token string) (Joined, error) {
	d, err := OpenDir(o, path)
	if err == nil && d.f == nil {
		err = fmt.Errorf("open %s: %w", path, os.ErrNotExist)
	}
	if err != nil {
		return Joined{}, err
	}
	text, err := filesys.ReadFile(d.f, lockName, 1<<10)
	if err == nil && !slices.Contains(strings.Split(string(text), "\n"), token) {
		err = fmt.Errorf("%s is another folder there than the one that the run has open", path)
	}
	user := int64(filesys.NoOwner)
	if err == nil {
		user, err = d.f.Owner()
	}
	if err != nil {
		return Joined{}, errors.Join(err, d.Close())
	}
	return Joined{d, user}, nil
}

// Joined is the open folder of a store that another process has open.
type Joined struct {
	Dir
	user int64
}

// Writing opens the folder of a Pending by its name.
func (j Joined) Writing(name string) (filesys.Folder, error) { return j.writing(name, j.user) }

func writeAt(f filesys.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// holder reads who has the lock.
func holder(f filesys.File) string {
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 200))
	line, _, _ := strings.Cut(string(text), "\n")
	if err != nil || line == "" {
		return "it does not say which"
	}
	return fmt.Sprintf("%.80s", strings.Map(printable, line))
}

func printable(r rune) rune {
	if r < ' ' || r > '~' {
		return '?'
	}
	return r
}

// release removes the lock's name while it is still ours, and gives it back. A name
// that stays does no harm: a file that nobody has locked holds nobody up.
func (s *Store) release(f filesys.File) error {
	if ours, err := f.Stat(); err == nil {
		if named, err := s.f.Lstat(lockName); err == nil && filesys.Same(ours, named) {
			_ = s.f.Remove(lockName)
		}
	}
	return f.Close()
}

// Held is Dir.Held of the folder at a path.
func Held(dir string) error {
	d, err := OpenDir(filesys.System, dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Held(), d.Close())
}

// Held returns a *Busy if a process has the folder open for writing. It changes nothing.
func (d Dir) Held() error {
	if d.f == nil {
		return nil
	}
	f, err := d.f.OpenFile(lockName, os.O_RDWR|filesys.NoWait, 0)
	if errors.Is(err, os.ErrPermission) { // another user's, which a network file system locks for none but its writers
		f, err = d.f.OpenFile(lockName, os.O_RDONLY|filesys.NoWait, 0)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	got, err := tryLock(f)
	if err == nil && !got {
		return &Busy{d.f.Path(), holder(f)}
	}
	return err
}

// tryLock takes the lock of an open file; false where another process has it.
func tryLock(f filesys.File) (bool, error) {
	got, err := f.TryLock()
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return false, errors.New("checkpoint folders can't be locked on this system; two runs could write there at once")
	case err != nil:
		return false, fmt.Errorf("its filesystem gives no locks (flock: %w); two runs could write there at once", err)
	}
	return got, nil
}
