package bizlogic

import (
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// A new catalogue knows some services, categories and safe-search engines, so that policies can name them
// from the start. Operators add lists, which fill the categories.

// seedServices is service → group and the domains that serve it and nothing else of note.
var seedServices = map[string]struct {
	name, group string
	domains     []string
}{
	"amazon-video":  {"Prime Video", "video", []string{"primevideo.com", "amazonvideo.com", "aiv-cdn.net", "aiv-delivery.net"}},
	"bluesky":       {"Bluesky", "social", []string{"bsky.app", "bsky.social", "bsky.network"}},
	"discord":       {"Discord", "messenger", []string{"discord.com", "discord.gg", "discordapp.com", "discordapp.net", "discord.media"}},
	"disney-plus":   {"Disney+", "video", []string{"disneyplus.com", "disney-plus.net", "dssott.com", "bamgrid.com"}},
	"ebay":          {"eBay", "shopping", []string{"ebay.com", "ebay.de", "ebay.co.uk", "ebayimg.com", "ebaystatic.com"}},
	"epic-games":    {"Epic Games", "games", []string{"epicgames.com", "epicgames.dev", "unrealengine.com", "fortnite.com"}},
	"facebook":      {"Facebook", "social", []string{"facebook.com", "facebook.net", "fbcdn.net", "fb.com", "fb.me", "fbsbx.com", "messenger.com"}},
	"hulu":          {"Hulu", "video", []string{"hulu.com", "hulustream.com", "huluim.com"}},
	"instagram":     {"Instagram", "social", []string{"instagram.com", "cdninstagram.com", "ig.me"}},
	"linkedin":      {"LinkedIn", "social", []string{"linkedin.com", "licdn.com", "lnkd.in"}},
	"minecraft":     {"Minecraft", "games", []string{"minecraft.net", "mojang.com", "minecraftservices.com"}},
	"netflix":       {"Netflix", "video", []string{"netflix.com", "netflix.net", "nflxext.com", "nflximg.net", "nflxso.net", "nflxvideo.net"}},
	"pinterest":     {"Pinterest", "social", []string{"pinterest.com", "pinimg.com", "pin.it"}},
	"playstation":   {"PlayStation", "games", []string{"playstation.com", "playstation.net", "sonyentertainmentnetwork.com"}},
	"reddit":        {"Reddit", "social", []string{"reddit.com", "redd.it", "redditmedia.com", "redditstatic.com"}},
	"roblox":        {"Roblox", "games", []string{"roblox.com", "rbxcdn.com", "rbx.com"}},
	"signal":        {"Signal", "messenger", []string{"signal.org", "whispersystems.org"}},
	"snapchat":      {"Snapchat", "social", []string{"snapchat.com", "sc-cdn.net", "snap.com", "snapkit.com", "sc-gw.com"}},
	"soundcloud":    {"SoundCloud", "audio", []string{"soundcloud.com", "sndcdn.com"}},
	"spotify":       {"Spotify", "audio", []string{"spotify.com", "scdn.co", "spotifycdn.com", "spoti.fi"}},
	"steam":         {"Steam", "games", []string{"steampowered.com", "steamcommunity.com", "steamcontent.com", "steamstatic.com", "steamusercontent.com", "steamserver.net"}},
	"telegram":      {"Telegram", "messenger", []string{"telegram.org", "telegram.me", "t.me", "telegram.dog", "telesco.pe"}},
	"tiktok":        {"TikTok", "video", []string{"tiktok.com", "tiktokv.com", "tiktokcdn.com", "tiktokcdn-us.com", "tiktokcdn-eu.com", "ttwstatic.com", "musical.ly", "byteoversea.com"}},
	"tinder":        {"Tinder", "dating", []string{"tinder.com", "gotinder.com", "tindersparks.com"}},
	"tumblr":        {"Tumblr", "social", []string{"tumblr.com"}},
	"twitch":        {"Twitch", "video", []string{"twitch.tv", "ttvnw.net", "jtvnw.net", "twitchcdn.net", "twitchsvc.net"}},
	"viber":         {"Viber", "messenger", []string{"viber.com", "viber.io"}},
	"vimeo":         {"Vimeo", "video", []string{"vimeo.com", "vimeocdn.com"}},
	"vk":            {"VK", "social", []string{"vk.com", "vk.me", "userapi.com", "vkuser.net"}},
	"whatsapp":      {"WhatsApp", "messenger", []string{"whatsapp.com", "whatsapp.net", "wa.me"}},
	"x":             {"X", "social", []string{"x.com", "twitter.com", "twimg.com", "t.co"}},
	"xbox":          {"Xbox", "games", []string{"xbox.com", "xboxlive.com", "xboxservices.com"}},
	"youtube":       {"YouTube", "video", []string{"youtube.com", "youtu.be", "ytimg.com", "googlevideo.com", "youtube-nocookie.com", "youtubei.googleapis.com", "youtubekids.com"}},
	"zoom":          {"Zoom", "messenger", []string{"zoom.us", "zoom.com"}},
	"apple-tv-plus": {"Apple TV+", "video", []string{"tv.apple.com"}},
}

// seedCategories is category → how it takes part in safe_browsing and adult.
var seedCategories = map[string]*userv1.Category{
	"ads":      {Name: "Advertising"},
	"tracking": {Name: "Tracking"},
	"malware":  {Name: "Malware", Threat: true, SafeBrowsing: true},
	"phishing": {Name: "Phishing and fraud", Threat: true, SafeBrowsing: true},
	"adult":    {Name: "Adult content", Adult: true},
	"gambling": {Name: "Gambling"},
	"dating":   {Name: "Dating"},
	"social":   {Name: "Social networks"},
	"piracy":   {Name: "Piracy"},
	"bypass":   {Name: "Ways around filtering"},
}

// googleDomains is where Google's search answers, under "www." and alone.
var googleDomains = []string{"com", "ad", "ae", "at", "be", "bg", "ca", "ch", "cl", "cz", "de", "dk", "ee", "es", "fi", "fr", "gr", "hr", "hu",
	"ie", "is", "it", "lt", "lu", "lv", "nl", "no", "pl", "pt", "ro", "rs", "se", "si", "sk", "com.ar", "com.au", "com.br", "com.co", "com.cy",
	"com.hk", "com.mx", "com.mt", "com.ph", "com.sg", "com.tr", "com.tw", "com.ua", "com.vn", "co.id", "co.il", "co.in", "co.jp", "co.kr",
	"co.nz", "co.th", "co.uk", "co.za"}

// seedSafeSearch is engine → names and what their operators say to answer instead.
func seedSafeSearch() map[string]*userv1.SafeSearch {
	alias := func(to string, names ...string) []*userv1.Rewrite {
		var out []*userv1.Rewrite
		for _, n := range names {
			out = append(out, &userv1.Rewrite{Name: n, Records: []string{"CNAME " + to}})
		}
		return out
	}
	var google []string
	for _, d := range googleDomains {
		google = append(google, "google."+d, "www.google."+d)
	}
	youtube := []string{"www.youtube.com", "m.youtube.com", "youtubei.googleapis.com", "youtube.googleapis.com", "www.youtube-nocookie.com"}
	return map[string]*userv1.SafeSearch{
		"google":           {Name: "Google", Rewrites: alias("forcesafesearch.google.com", google...)},
		"bing":             {Name: "Bing", Rewrites: alias("strict.bing.com", "bing.com", "www.bing.com")},
		"duckduckgo":       {Name: "DuckDuckGo", Rewrites: alias("safe.duckduckgo.com", "duckduckgo.com", "www.duckduckgo.com")},
		"youtube":          {Name: "YouTube, restricted", Rewrites: alias("restrict.youtube.com", youtube...)},
		"youtube-moderate": {Name: "YouTube, moderately restricted", Rewrites: alias("restrictmoderate.youtube.com", youtube...)},
		"brave":            {Name: "Brave Search", Rewrites: alias("forcesafe.search.brave.com", "search.brave.com")},
		"pixabay":          {Name: "Pixabay", Rewrites: alias("safesearch.pixabay.com", "pixabay.com")},
	}
}

// seedCatalogue fills the catalogue of a store that is being made.
func seedCatalogue(tx *bolt.Tx, id *storev1.Identity, now time.Time) error {
	b := newBatch(tx, id, now, Guard{}.withDefaults(), "")
	_, err := b.run(&op{plan: func(v *view) error {
		for i, key := range sortedKeys(seedServices) {
			s := seedServices[key]
			svc := &userv1.Service{Name: s.name, Group: s.group, Number: uint32(i)}
			for _, d := range slices.Sorted(slices.Values(s.domains)) {
				svc.Rules = append(svc.Rules, "||"+d+"^")
			}
			if err := v.put(Catalogue, "service/"+key, svc); err != nil {
				return err
			}
		}
		for i, key := range sortedKeys(seedCategories) {
			c := &userv1.Category{Name: seedCategories[key].Name, Threat: seedCategories[key].Threat,
				SafeBrowsing: seedCategories[key].SafeBrowsing, Adult: seedCategories[key].Adult, Number: uint32(i)}
			if err := v.put(Catalogue, "category/"+key, c); err != nil {
				return err
			}
		}
		for key, s := range seedSafeSearch() {
			if err := v.put(Catalogue, "safesearch/"+key, s); err != nil {
				return err
			}
		}
		return nil
	}})
	if err != nil {
		return err
	}
	return b.finish()
}
