package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

func (a *app) addLists(root *cobra.Command) {
	g := group(root, "list", "Filter lists of the catalogue")
	g.AddCommand(a.listAdd(), a.listGet(), a.listList(), a.listDelete(), a.listRefresh(), a.listAccept())
}

// compileWithin is how long a list may take to be fetched and compiled, whatever --timeout says.
const compileWithin = 5 * time.Minute

func (a *app) listAdd() *cobra.Command {
	var file string
	var refresh time.Duration
	h := &adminv1.AddListRequest_Header{}
	c := &cobra.Command{
		Use: "add ID --file FILE | --url URL", Short: "Make a list, and return when it is compiled", Args: cobra.ExactArgs(1),
		Long: "Make a list from a file or a URL, and return when it is compiled: how many rules, how many lines that cannot\nbe used, and the hash of the text.",
	}
	f := c.Flags()
	f.StringVarP(&file, "file", "f", "", "`file` of rules; - reads standard input")
	f.StringVar(&h.Url, "url", "", "`URL` to fetch it from, now and every --refresh: http, https, or a file: the service may read")
	f.DurationVar(&refresh, "refresh", 24*time.Hour, "how often to fetch it")
	f.StringVar(&h.Name, "name", "", "`name` for people")
	f.StringVar(&h.Homepage, "homepage", "", "`URL` where people read about it")
	f.BoolVar(&h.Replace, "replace", false, "give an existing list the new text")
	f.BoolVar(&h.Accept, "accept", false, "take the text even if it has lost many rules")
	c.MarkFlagsMutuallyExclusive("file", "url")
	c.MarkFlagsOneRequired("file", "url")
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		h.Id, h.IfRevision = args[0], ch.ifRevision
		if h.Url != "" {
			if refresh < time.Second {
				return usagef("refresh", "--refresh %v is less than a second", refresh)
			}
			h.Refresh = uint64(refresh / time.Second)
		}
		name := shownURL(h.Url)
		in := a.stdin
		if file != "" {
			name = file
			if file != "-" {
				f, err := os.Open(file)
				if err != nil {
					return failedf("%w", err)
				}
				defer f.Close()
				in = f
			}
		}
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := context.WithTimeout(c.Context(), max(compileWithin, a.timeout))
			defer cancel()
			stream, err := adminv1.NewListServiceClient(conn).AddList(ctx)
			if err != nil {
				return err
			}
			err = stream.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: h}})
			if err == nil && h.Url == "" {
				err = sendChunks(in, name, func(b []byte) error {
					return stream.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Data{Data: b}})
				})
			}
			if err != nil && err != io.EOF { // io.EOF: the answer says why it is not wanted
				return err
			}
			resp, err := stream.CloseAndRecv()
			if err != nil {
				return err
			}
			if !a.json {
				a.complaints(name, resp.Complaints)
				if err := a.print(listLine(resp.List)); err != nil {
					return err
				}
			}
			return ch.done(c.Context(), resp)
		})
	}
	return c
}

// shownURL is a URL without the password it may hold.
func shownURL(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "the URL"
	}
	return u.Redacted()
}

// chunk is how many bytes of a text go in one message.
const chunk = 256 << 10

// sendChunks sends what it reads. An error of send is returned as it is.
func sendChunks(in io.Reader, name string, send func([]byte) error) error {
	buf := make([]byte, chunk)
	for {
		n, err := io.ReadFull(in, buf)
		if n > 0 {
			if err := send(buf[:n]); err != nil {
				return err
			}
		}
		switch err {
		case nil:
		case io.EOF, io.ErrUnexpectedEOF:
			return nil
		default:
			return failedf("reading %s: %w", fileName(name), err)
		}
	}
}

func listHead() *table {
	return &table{head: []string{"ID", "NAME", "RULES", "SKIPPED", "UPDATED", "FETCHED", "SHA256", "FROM", "ERROR"}}
}

func (t *table) addList(l *adminv1.List) {
	from, problem := l.GetUrl(), l.GetError()
	if from == "" {
		from = "uploaded"
	}
	if l.GetFailures() > 1 {
		problem = fmt.Sprintf("%d times in a row: %s", l.GetFailures(), problem)
	}
	if l.GetHeldRules() > 0 {
		problem = fmt.Sprintf("a text of %d rules is held; %s", l.GetHeldRules(), problem)
	}
	if l.GetBehind() > 0 {
		problem = strings.TrimSuffix(heldTexts(l)+"; "+problem, "; ")
	}
	t.add(l.GetId(), l.GetName(), l.GetRules(), l.GetSkipped(), when(l.GetUpdated()), when(l.GetFetched()), short(l.GetSha256()), from, problem)
}

// heldTexts is about those who have an older text of a list.
func heldTexts(l *adminv1.List) string {
	return fmt.Sprintf("%d of %d keep an older text: with this one they would have more rules than own_lists.rules", l.GetBehind(), l.GetUsedBy())
}

func listLine(l *adminv1.List) *table {
	t := listHead()
	t.addList(l)
	return t
}

func (a *app) listGet() *cobra.Command {
	return &cobra.Command{Use: "get ID | URL", Short: "Show a list, by its URL one that users have among their own", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(listIDs),
		RunE: func(c *cobra.Command, args []string) error {
			return a.atService(func(conn *grpc.ClientConn) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := adminv1.NewListServiceClient(conn).GetList(ctx, &adminv1.GetListRequest{Id: args[0]})
				if err != nil {
					return err
				}
				l := resp.List
				return show(a, []*adminv1.List{l}, func() *table {
					t := &table{}
					t.add("id", l.GetId())
					t.add("revision", l.GetRevision())
					t.add("name", l.GetName())
					t.add("number", l.GetNumber())
					t.add("rules", l.GetRules())
					t.add("skipped", l.GetSkipped())
					t.add("size", l.GetSize())
					t.add("sha256", l.GetSha256())
					t.add("updated", when(l.GetUpdated()))
					t.add("url", l.GetUrl())
					if l.GetUrl() != "" {
						t.add("refresh", time.Duration(l.GetRefresh())*time.Second)
						t.add("fetched", when(l.GetFetched()))
						t.add("tried", when(l.GetTried()))
						t.add("failures", l.GetFailures())
					}
					t.add("homepage", l.GetHomepage())
					t.add("error", l.GetError())
					if l.GetHeldRules() > 0 {
						t.add("held", fmt.Sprintf("a text of %d rules; list accept takes it", l.GetHeldRules()))
					}
					if l.GetBehind() > 0 {
						t.add("behind", heldTexts(l))
					}
					return t
				})
			})
		}}
}

func (a *app) listList() *cobra.Command {
	req := &adminv1.ListListsRequest{}
	c := &cobra.Command{Use: "list", Short: "Show all lists", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			resp, err := adminv1.NewListServiceClient(conn).ListLists(ctx, req)
			if err != nil {
				return err
			}
			return show(a, resp.Lists, func() *table {
				t := listHead()
				if req.Own {
					t.head = append(t.head, "USED BY")
				}
				for _, l := range resp.Lists {
					t.addList(l)
					if last := len(t.rows) - 1; req.Own {
						t.rows[last] = append(t.rows[last], fmt.Sprint(l.GetUsedBy()))
					}
				}
				return t
			})
		})
	}}
	c.Flags().BoolVar(&req.Own, "own", false, "lists at URLs that users have among their own, instead of those of the catalogue")
	return c
}

func (a *app) listDelete() *cobra.Command {
	c := &cobra.Command{Use: "delete ID", Short: "Remove a list that no policy, category, user or device names", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(listIDs)}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewListServiceClient(conn).DeleteList(ctx, &adminv1.DeleteListRequest{Id: args[0], IfRevision: ch.ifRevision})
		})
	}
	return c
}

func (a *app) listRefresh() *cobra.Command {
	c := &cobra.Command{Use: "refresh ID | URL", Short: "Fetch a list now", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(listIDs)}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := ch.unconditional("a list is fetched whatever it was"); err != nil {
			return err
		}
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := context.WithTimeout(c.Context(), max(compileWithin, a.timeout))
			defer cancel()
			resp, err := adminv1.NewListServiceClient(conn).RefreshList(ctx, &adminv1.RefreshListRequest{Id: args[0]})
			if err != nil {
				return err
			}
			if !resp.Changed {
				a.note("%s has not changed", args[0])
			}
			return ch.done(c.Context(), resp)
		})
	}
	return c
}

func (a *app) listAccept() *cobra.Command {
	c := &cobra.Command{Use: "accept ID | URL", Short: "Take the text that the shrink guard holds", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(listIDs)}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := ch.unconditional("the text that is held is taken, whatever the list was"); err != nil {
			return err
		}
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := context.WithTimeout(c.Context(), max(compileWithin, a.timeout))
			defer cancel()
			resp, err := adminv1.NewListServiceClient(conn).AcceptList(ctx, &adminv1.AcceptListRequest{Id: args[0]})
			if err != nil {
				return err
			}
			return ch.done(c.Context(), resp)
		})
	}
	return c
}
